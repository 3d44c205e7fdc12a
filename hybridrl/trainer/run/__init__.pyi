from .column_check import check_columns as check_columns
from .middleware import preview_stages as preview_stages
from .page import served_page as served_page
from .report import report_run as report_run
from .setup import newest_checkpoint_of_run as newest_checkpoint_of_run
from .setup import prepared_run_directory as prepared_run_directory
from .setup import run_directory as run_directory
from .setup import warn_about_disabled_outputs as warn_about_disabled_outputs
