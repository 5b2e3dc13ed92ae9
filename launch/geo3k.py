"""Geometry3k (https://huggingface.co/datasets/hiyouga/geometry3k: 2,101 / 300 / 601 rows) as JSONL and PNG files.

It reads parquet, for which the trainer has no package, so it has an environment of its own:

    python -m venv .venv-geo3k && .venv-geo3k/bin/pip install pyarrow pillow huggingface_hub
    .venv-geo3k/bin/hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    .venv-geo3k/bin/python launch/geo3k.py geometry3k/data --out data/geo3k

    <out>/train.jsonl, validation.jsonl, test.jsonl     rows {"prompt", "images", "answer", "label"}
    <out>/images/                                       <split>-<row>-<place>.png

Any folder of <split>-*.parquet with the columns images, problem and answer will do.
"""

import argparse
import io
import json
import tempfile
from pathlib import Path

from PIL import Image


def convert(row: dict, name: str, images: Path, label: str) -> dict:
    """One row of the trainer from one of the table; its pictures are written to the folder `images` as <name>-<place>.png.

    row: {"images": [{"bytes": encoded picture, ...}, ...], "problem": text with an <image> for each, "answer": text}.
    Raises ValueError: no text, or not one <image> per picture; an error of Pillow: a picture that cannot be read.
    """
    problem, answer, pictures = row["problem"], row["answer"], row["images"] or []
    if not all(isinstance(text, str) and text.strip() for text in (problem, answer)):
        raise ValueError(f"{name}: problem and answer must be texts, not {problem!r:.80} and {answer!r:.80}")
    if problem.count("<image>") not in (0, len(pictures)):  # none: the trainer puts the pictures first
        raise ValueError(f"{name}: {len(pictures)} pictures for {problem.count('<image>')} places: {problem!r:.120}")
    files = []
    for place, picture in enumerate(pictures):
        path, data = images / f"{name}-{place}.png", picture["bytes"]
        with Image.open(io.BytesIO(data)) as image:
            if image.format == "PNG":
                path.write_bytes(data)
            else:
                (image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")).save(path)
        files.append(f"{images.name}/{path.name}")
    return {"prompt": problem, "images": files, "answer": answer, "label": label}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of the parquet files")
    parser.add_argument("--out", type=Path, default=Path("data/geo3k"), help="new folder to write")
    parser.add_argument("--label", default="geo3k", help="label of all rows")
    args = parser.parse_args(argv)
    splits: dict[str, list[Path]] = {}
    for path in sorted(args.source.glob("*.parquet")):
        splits.setdefault(path.stem.split("-")[0], []).append(path)
    if not splits:
        parser.error(f"no parquet files in {args.source}")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it or name another")
    import pyarrow.parquet as parquet  # here, so that `convert` can be tested without it

    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and renamed: whoever finds <out> finds all of it.
    with tempfile.TemporaryDirectory(prefix=f"{args.out.name}.", dir=args.out.parent) as scratch:
        folder = Path(scratch) / "whole"
        (folder / "images").mkdir(parents=True)
        for split, paths in splits.items():
            number = 0
            with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as rows:
                for path in paths:
                    for batch in parquet.ParquetFile(path).iter_batches(100, columns=["images", "problem", "answer"]):
                        for row in batch.to_pylist():
                            rows.write(json.dumps(convert(row, f"{split}-{number:05d}", folder / "images", args.label)) + "\n")
                            number += 1
            print(f"{split}.jsonl: {number} rows", flush=True)
        folder.rename(args.out)


if __name__ == "__main__":
    main()
