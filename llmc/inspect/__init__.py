"""What llmc makes of a model, from its config.json alone: no weights, no GPU, seconds.

inspect.inspect_model   EngineConfig -> Inspection (facts, layers, passes, kernels)
fit                     what fits in some memory, how fast a bandwidth lets it decode
page                    Inspection -> one self-contained HTML page of the graph, pass by pass
"""
