from .images import ImageColumn as ImageColumn
from .images import check_tokens as check_tokens
from .images import find_column as find_column
from .images import messages_with_data as messages_with_data
from .images import read_images as read_images
from .other_sources import hub_table as hub_table
from .other_sources import json_lines_table as json_lines_table
