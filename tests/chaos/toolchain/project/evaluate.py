"""In place of `trainium.model.evaluate`: takes the same words, and makes losses of the export's digest."""

import argparse
import sys
from pathlib import Path

from trainium.files import read_json, write_json


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--base", "--tuned", "--data", "--report"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    words, _ = parser.parse_known_args()
    digest = read_json(words.tuned / "trainium_export.json")["digest"]
    tuned = 1 + int(digest[:6], 16) / 2**24
    rows = min(words.rows, len(words.data.read_text().splitlines()))
    write_json(words.report, {"base": {"loss": 3.0}, "tuned": {"loss": tuned}, "rows": rows, "samples": []})
    return 0


if __name__ == "__main__":
    sys.exit(main())
