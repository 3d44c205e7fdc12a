from .other_sources import hub_table as hub_table
from .other_sources import json_lines_table as json_lines_table
