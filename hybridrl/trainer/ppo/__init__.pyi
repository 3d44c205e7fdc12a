from .distillation import add_no_advantages as add_no_advantages
from .distillation import add_no_scores as add_no_scores
from .distillation import add_teacher_advantages as add_teacher_advantages
from .distillation import check_teachers as check_teachers
from .distillation import score_by_teachers as score_by_teachers
from .distillation import teacher_metrics as teacher_metrics
from .stages import uses_critic as uses_critic
from .stages import uses_reference as uses_reference
