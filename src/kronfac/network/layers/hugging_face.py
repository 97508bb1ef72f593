"""Layers of Hugging Face's transformers, by name: nothing of it is imported."""

from kronfac.network.adapter import register_name
from kronfac.network.layers.linear import TransposedLinearAdapter

register_name("transformers.pytorch_utils.Conv1D", TransposedLinearAdapter())
