"""The data sets of [MG15 §3, §13]: downloaded, verified and cached, or generated from a seed.

`mnist.mnist()`, `mnist.mnist_16x16()`, `curves.curves()` and `faces.faces()` give tensors, and so does
`shakespeare.shakespeare()` for the race on networks.
Nothing is re-exported: the functions would hide the modules of the same names.
"""
