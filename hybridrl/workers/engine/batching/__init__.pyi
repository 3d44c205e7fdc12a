from .tree_attention import use_tree_attention as use_tree_attention
from .tree_layout import make_tree_layout as make_tree_layout
from .tree_layout import tree_micro_batches as tree_micro_batches
