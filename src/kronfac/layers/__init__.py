"""One adaptor a layer type: what K-FAC sees of a module."""

from kronfac.layers.base import Layer, Matrices, dot
from kronfac.layers.find import find_layers, refuse_changes
from kronfac.layers.linear import LinearLayer
from kronfac.layers.replaced import replaced

__all__ = ["Layer", "LinearLayer", "Matrices", "dot", "find_layers", "refuse_changes", "replaced"]
