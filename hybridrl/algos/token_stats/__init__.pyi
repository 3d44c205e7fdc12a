from .from_logits import log_probs_and_entropy as log_probs_and_entropy
from .from_logits import of_log_probs as of_log_probs
from .from_logits import token_stats as token_stats
from .from_states import FinalLogits as FinalLogits
from .from_states import TokenStats as TokenStats
from .from_states import VocabularyShard as VocabularyShard
from .from_states import token_stats_of_states as token_stats_of_states
