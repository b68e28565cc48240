"""The parity certificate: the step that serves is compared with the model's own code.

check.check_model   eager module and rewritten step on the same tokens -> Certificate
certificate         what was compared, under which key, and where it is kept
bisect               which pass, kernel or compiler makes the difference
"""
