from .image_layout import with_images as with_images
from .tree_layout import make_tree_layout as make_tree_layout
from .tree_layout import tree_micro_batches as tree_micro_batches
