"""Codecs of quantised weights: several stored tensors that are one tensor together."""
