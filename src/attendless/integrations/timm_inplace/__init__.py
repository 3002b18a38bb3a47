"""Attentions of other libraries' models, exchanged in place: the module stays, and its class is replaced.

Each such attention calls PyTorch's fused attention once; an attendless attention computes that call instead.
"""
