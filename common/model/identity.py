"""What makes a run the same run: what its flags name counts by its content, and paths do not."""

import hashlib
import os
from pathlib import Path

from common.files import read_text, sha256
from common.flags import absolute_paths, map_parts
from common.model.weights import stored_tensors

# flags that name data, models or programs
NAMING = (
    "model critic_model reference_model teacher_model data ptx_data reward reward_recipe "
    "reward_combiner env"
)
# files of a model that say how it computes, and how it is asked
SETTINGS = (
    "config.json generation_config.json preprocessor_config.json video_preprocessor_config.json "
    "tokenizer.json tokenizer_config.json processor_config.json chat_template.jinja "
    "chat_template.json judge.json"
)


def contents(flags: dict) -> dict[str, str]:
    """Digests of what flags name, by flag. Raises ValueError, OSError: it cannot be read."""
    named = {name: flags[name] for name in NAMING.split() if name in flags}
    recipe = named.get("reward_recipe", "")
    if os.path.isfile(recipe):
        named["reward_recipe"] = absolute_paths(read_text(recipe))
    return {name: digest(spec) for name, spec in named.items()}


def digest(spec: str) -> str:
    """A flag's value with digests in place of its paths."""
    path = Path(spec)
    if path.is_absolute() and path.exists():
        return digest_model(path) if path.is_dir() else sha256(path)[:12]
    return map_parts(spec, digest)


def digest_model(folder: Path) -> str:
    """Of the files in SETTINGS, and of the names and shapes of its weights and a few
    numbers of each, in whatever files they are: cheap for any size, and training changes it."""
    settings = [folder / name for name in SETTINGS.split() if (folder / name).is_file()]
    parts = [f"{path.name} {sha256(path)}" for path in settings]
    for _, key, value in stored_tensors(folder):
        numbers = value.flatten()[:: 1 + value.numel() // 8].tolist()
        parts.append(f"{key} {value.shape} {numbers}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]
