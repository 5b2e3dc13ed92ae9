"""What makes a run the same run: what its flags name counts by its content, and paths do not."""

import hashlib
from pathlib import Path

from common.files import sha256
from common.model.weights import open_weights, weight_files

# flags that name data, models or programs
NAMING = (
    "model critic_model reference_model teacher_model data ptx_data reward reward_recipe "
    "reward_combiner env"
)
# files of a model that say how it is asked
ASKING = (
    "chat_template.jinja chat_template.json processor_config.json tokenizer_config.json judge.json"
)


def contents(flags: dict) -> dict[str, str]:
    """Digests of what flags name, by flag. Raises ValueError, OSError: it cannot be read."""
    return {name: digest(flags[name]) for name in NAMING.split() if name in flags}


def digest(spec: str) -> str:
    """A flag's value with digests in place of its paths: of one, or of several as in
    a.jsonl:0.7,b.jsonl:0.3 or grm:FOLDER,file.py:function."""
    path = Path(spec)
    if path.is_absolute() and path.exists():
        return digest_model(path) if path.is_dir() else sha256(path)[:12]
    for mark in ",:":
        if mark in spec and "://" not in spec:
            return mark.join(map(digest, spec.split(mark)))
    return spec


def digest_model(folder: Path) -> str:
    """Of the files that say how a model is asked, and of the names and shapes of its weights and a few
    numbers of each, in whatever files they are: cheap for any size, and training changes it."""
    asking = [folder / name for name in ASKING.split() if (folder / name).is_file()]
    parts = [f"{path.name} {sha256(path)}" for path in asking]
    for path in weight_files(folder):
        with open_weights(path) as tensors:
            for key in tensors.keys():
                value = tensors.get_tensor(key)  # in mapped memory: only what is used is read
                numbers = value.flatten()[:: 1 + value.numel() // 8].tolist()
                parts.append(f"{key} {value.shape} {numbers}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]
