"""The script that every task of a compile or training job runs: what NxDT's `train.sh` does, without its traps.

`train.sh` looks for its config only in `./conf`, goes on without one, and uses the cache and log folder that
`train_setup.sh` has just overwritten (read in neuronx-distributed-training, examples/). So this launch sources
`train_setup.sh` for what it knows of the cluster, sets those variables again, and names its config by absolute path.
It runs in the job's own folder, where neuron_parallel_compile dumps its results and Hydra its outputs. The log folder
is a value in the config and no override on the command line: Hydra would parse a path with a comma or a quote in it.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from trainium.config.nxdt import Phase

MISSING_CONFIG = 66  # EX_NOINPUT of sysexits.h
MONITOR_SAMPLE = "neuron-monitor-{}.json"  # by node number, in the job's folder

# Only the newest sample is kept, so days of training fill no disk. The monitor ends with this script, whatever ends it.
_MONITOR = (
    "# What the cores do, for the flow to show; a node without neuron-monitor trains as well",
    "monitor=$(command -v neuron-monitor || echo /opt/aws/neuron/bin/neuron-monitor)",
    'if [ -x "$monitor" ]; then',
    '    "$monitor" 2>/dev/null > >(while IFS= read -r sample; do',
    f'        printf "%s\\n" "$sample" > "{MONITOR_SAMPLE.format("$NODEID")}.new" &&',
    f'            mv -f "{MONITOR_SAMPLE.format("$NODEID")}.new" "{MONITOR_SAMPLE.format("$NODEID")}"',
    "    done >/dev/null 2>&1) &",
    "    trap 'kill %1 2>/dev/null' EXIT",
    "fi",
    "",
)
# A shell would end of it, and so would a trainer without a handler; Python's handlers work although it is ignored here.
_NOTICE = (
    "# The notice before the time limit (resources.train.signal_before_end) is for a trainer that knows it",
    "trap '' USR1",
    "",
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What differs between launches. All paths absolute; `cores`: of a node, one process each (NxDT: `devices`)."""

    phase: Phase
    examples: Path
    config: Path
    cache: Path
    log_folder: Path
    version: str
    cores: int


def render_launch(launch: Launch) -> str:
    """The script's text. Pure; every value is quoted."""
    q = shlex.quote
    exports = {
        "NEURON_COMPILE_CACHE_URL": str(launch.cache),
        "EXPLICIT_LOGDIR": str(launch.log_folder),
        "NEMO_EXPM_VERSION": launch.version,
    }
    if launch.phase == "compile":
        # The dumped JSON is what the gate reads first; COMPILE=1 makes the trial run ten steps long.
        exports |= {"COMPILE": "1", "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1"}
    before = "neuron_parallel_compile " if launch.phase == "compile" else ""
    training = (*_NOTICE, *_MONITOR) if launch.phase == "train" else ()
    lines = [
        "#!/bin/bash",
        f"# trainium-flows: {launch.phase}, run once by every task of the job",
        "set -o pipefail",
        "",
        f"config={q(str(launch.config))}",
        'if [ ! -f "$config" ]; then',
        '    echo "launch: the config $config is missing on $(hostname); is the run folder shared?" >&2',
        f"    exit {MISSING_CONFIG}",
        "fi",
        "",
        f"source {q(str(launch.examples / 'train_setup.sh'))} || exit",
        "",
        "# train_setup.sh has just set some of these to values of its own",
        *(f"export {name}={q(value)}" for name, value in exports.items()),
        "",
        *training,
        f"{before}torchrun \\",
        f"    --nproc_per_node {launch.cores} \\",
        '    --nnodes "$NTASKS" \\',
        '    --node_rank "$NODEID" \\',
        '    --master_addr "$MASTER_ADDR" \\',
        '    --master_port "$MASTER_PORT" \\',
        f"    {q(str(launch.examples / 'training_orchestrator.py'))} \\",
        f"    --config-path={q(str(launch.config.parent))} \\",
        f"    --config-name={q(launch.config.stem)} \\",
        f"    trainer.devices={launch.cores} \\",
        '    trainer.num_nodes="$NTASKS"',
        "",
    ]
    return "\n".join(lines)
