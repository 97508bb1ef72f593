"""The layers that K-FAC knows: one file per kind, with its adapter and its torch functions."""

from kronfac.model.layers import attention as attention
from kronfac.model.layers import bilinear as bilinear
from kronfac.model.layers import convolution as convolution
from kronfac.model.layers import elementwise as elementwise
from kronfac.model.layers import embedding as embedding
from kronfac.model.layers import linear as linear
from kronfac.model.layers import normalization as normalization
from kronfac.model.layers import recurrent as recurrent
