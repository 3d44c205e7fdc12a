from .image_layout import with_images as with_images
from .sequence_parallel import SumOverPeers as SumOverPeers
from .sequence_parallel import part_of_layout as part_of_layout
from .sequence_parallel import sequence_part as sequence_part
from .sequence_parallel import use_sequence_parallel as use_sequence_parallel
from .tree_attention import use_tree_attention as use_tree_attention
from .tree_layout import make_tree_layout as make_tree_layout
from .tree_layout import tree_micro_batches as tree_micro_batches
