"""What a process looks up at its first run: transformers' patterns of the names of weights, 1,100 of them,
and PIL's formats. Imported before ranks are forked."""

from PIL import Image
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("qwen2_5_vl")
Image.init()
