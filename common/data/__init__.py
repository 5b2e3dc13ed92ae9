"""From files to batches of prompts: what the scripts use of this room."""

from common.data.images import read_frames
from common.data.loader import (
    PromptLoader,
    batches_in_order,
    digest_data,
    draw_batches,
    join_pixels,
    repeated_rows,
    shares_of,
)
from common.data.processor import Processor
from common.data.rows import Prompt, load_prompts, parse_columns, user_text
