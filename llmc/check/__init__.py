"""The parity certificate: compares the step that serves with the model's own code.

check.check_model   eager module and rewritten step on the same tokens -> Certificate
certificate          what was compared, under which key, and where it is stored
bisect               which pass, kernel or compiler causes a difference
"""
