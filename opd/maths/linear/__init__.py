"""Divergences straight from hidden states and heads, without logits of size N x V."""
