from flatout.values.tensors import DTYPES as DTYPES
from flatout.values.tensors import flat_bytes as flat_bytes
from flatout.values.tensors import refusal as refusal
from flatout.values.tensors import view_key as view_key
from flatout.values.tree import flatten as flatten
from flatout.values.tree import unflatten as unflatten
