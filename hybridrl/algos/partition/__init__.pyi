from . import prefix_tree as prefix_tree
from .balanced import balanced_partition as balanced_partition
from .balanced import check_fits as check_fits
from .balanced import micro_batches as micro_batches
