"""The logic of `llmc bench`: workloads, runs, metrics, reports. `cli/bench.py` adds the flags.

workloads --> offline (an engine in this process)  --> traces --> metrics --> report
          \\-> serving (any OpenAI-compatible URL) --/

explain: the ops of a step (observe, op_work) compared with the limits of the machine.
"""
