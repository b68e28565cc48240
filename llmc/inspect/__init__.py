"""Shows how llmc compiles a model, from its config.json alone: no weights, no GPU, in seconds.

inspect.inspect_model   EngineConfig -> Inspection (facts, layers, passes, kernels)
fit                     what fits in a given memory, and the decode speed a bandwidth allows
page                    Inspection -> one self-contained HTML page of the graph, pass by pass
"""
