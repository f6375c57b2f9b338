"""In place of `trainium.model.export`: takes the same words, proves the checkpoint whole, and leaves its digest.

The folder is made beside itself and takes its name when it is whole, as the real one's.
"""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from trainium.checkpoint.paths import find_shards
from trainium.checkpoint.shards import open_shard
from trainium.checkpoint.training import missing_parts
from trainium.checkpoint.weights import flat_bytes
from trainium.files import write_json


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--checkpoint", "--base", "--out", "--report"):
        parser.add_argument(name, type=Path, required=True)
    words, _ = parser.parse_known_args()
    if missing := missing_parts(words.checkpoint):
        print(f"error: checkpoint {words.checkpoint} is incomplete: {missing}", file=sys.stderr)
        return 2
    digest = hashlib.sha256()
    shards = find_shards(words.checkpoint / "model").files
    for rank in sorted(shards):
        shard = open_shard(shards[rank])
        for name in sorted(shard.info):
            shard.check(name)
            digest.update(f"{rank} {name} {shard.info[name]}".encode())
            digest.update(flat_bytes(shard.raw(name).copy()))
    work = words.out.with_name(f".{words.out.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    write_json(work / "trainium_export.json", {"digest": digest.hexdigest()})
    (work / "weights.sha256").write_text(digest.hexdigest())
    shutil.rmtree(words.out, ignore_errors=True)
    work.rename(words.out)
    verified = [f"weights: {len(shards)} shards read, digest {digest.hexdigest()[:12]}"]
    write_json(words.report, {"verified": verified, "notes": [], "table": [], "digest": digest.hexdigest()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
