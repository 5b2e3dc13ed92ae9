"""What both scripts share; README.md beside this file lists the modules. Importing it needs no package."""

from pathlib import Path

VERSION = "0.2.0"  # in checkpoints and exports; what each version changed: .github/NEWS.md
ROOT = Path(__file__).resolve().parents[1]  # the project's folder
