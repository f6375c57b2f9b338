"""The recipe as a typed tree: what a user may write, with the unit and the meaning of every value.

The descriptions are shown in the Prefect form and in error messages. Rules on one value are here; rules that compare
values, or a value with the model's config.json, are in `trainium.config.rules`. Defaults live in one place,
`deployments/recipes/base.yaml`; only what may be left out has one here.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.layout import Qkv
from trainium.config.fields import (
    Count,
    Duration,
    Few,
    FileName,
    Folder,
    Memory,
    Name,
    Positive,
    SlurmWord,
    given,
    hub_or_folder,
    is_repository,
    keep_two,
    s3_or_folder,
)
from trainium.config.instances import InstanceName

REHEARSAL = "rehearsal"
SourceKind = Literal["rehearsal", "folder", "hub", "s3"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Expected(Section):
    """The model's shape as the author of the recipe knows it.

    Stands in for config.json in an offline dry run and is compared with it as soon as it is there.
    """

    layers: Few = Field(description="Number of transformer layers (num_hidden_layers).")
    hidden_size: Positive = Field(description="Width of the residual stream (hidden_size).")
    heads: Few = Field(description="Number of query heads (num_attention_heads).")
    kv_heads: Few = Field(description="Number of key/value heads (num_key_value_heads).")


class Model(Section):
    """The base model."""

    source: Annotated[
        Folder, given("model.source=PATH (a folder with config.json) or OWNER/NAME"), AfterValidator(hub_or_folder)
    ] = Field(
        description="Hugging Face repository id (owner/name), a folder (absolute, or starting with ./), or rehearsal."
    )
    revision: str = Field("main", min_length=1, description="Branch, tag or commit of the repository; pinned at start.")
    folder: Folder | None = Field(
        None, description="Folder to keep the model's files in, visible to all nodes; null: the run folder."
    )
    expected: Expected | None = Field(
        None, description="The shape config.json should have; null: whatever config.json says."
    )

    @property
    def kind(self) -> SourceKind:
        if self.source == REHEARSAL:
            return "rehearsal"
        return "hub" if is_repository(self.source) else "folder"


class Parallelism(Section):
    """How the model is spread over the cores."""

    tensor: Positive = Field(description="Tensor parallel degree: cores that share every layer.")
    pipeline: Positive = Field(1, description="Pipeline parallel degree: stages that the layers are cut into.")
    virtual_pipeline: Positive = Field(1, description="Slices per pipeline stage (interleaved schedule); 1: none.")
    kv_replicator: Positive = Field(
        1, description="Copies of each key/value head, so that kv_heads x copies equals the tensor parallel degree."
    )
    sequence_parallel: bool = Field(description="Also split the sequence over the tensor parallel cores.")
    zero1: bool = Field(description="Spread the optimizer state over the data parallel replicas (ZeRO-1).")


class Dataset(Section):
    """The training and held-out rows."""

    source: Annotated[Folder, given("dataset.source=FOLDER or s3://BUCKET/PREFIX"), AfterValidator(s3_or_folder)] = (
        Field(description="s3://bucket/prefix, a folder that holds both files, or rehearsal.")
    )
    train_file: FileName = Field(description="File name of the training rows in the source (.jsonl or .json).")
    validation_file: FileName = Field(description="File name of the held-out rows in the source (.jsonl or .json).")
    unsigned: bool = Field(False, description="Read S3 without credentials (public buckets).")
    prompt_field: str = Field("input", min_length=1, description="Column with the prompt.")
    response_field: str = Field("output", min_length=1, description="Column with the answer to learn.")
    folder: Folder | None = Field(
        None, description="Folder to keep fetched files in; null: the run folder. (The prepared rows are always there.)"
    )

    @property
    def kind(self) -> SourceKind:
        if self.source == REHEARSAL:
            return "rehearsal"
        return "s3" if self.source.startswith("s3://") else "folder"


class ActivationsCheckpoint(Section):
    """What is computed again in the backward pass instead of being kept."""

    granularity: Literal["selective", "full"] | None = Field(
        description="selective: the modules named in recompute; full: whole layers; null: nothing."
    )
    recompute: tuple[Literal["CoreAttention", "LlamaMLP", "ActivationMultiplyMLP"], ...] = Field(
        description="Modules recomputed when the granularity is selective."
    )


class Runtime(Section):
    """Settings of the Neuron runtime."""

    inflight_requests: Positive = Field(description="Executions queued on a core before the host waits.")
    collectives_bucket_mb: Positive = Field(description="Size of the buckets that collectives are batched into, in MB.")
    exec_timeout: Positive = Field(description="Seconds after which a hanging execution is an error.")
    compress_replica_groups: bool = Field(description="Experimental compression of replica groups.")


class Training(Section):
    """What the trainer does."""

    max_steps: Positive = Field(description="Optimizer steps of the whole run; a multiple of checkpoint_every.")
    seq_length: Positive = Field(description="Tokens per sample; at most the model's max_position_embeddings.")
    global_batch_size: Positive = Field(description="Samples per optimizer step over all nodes.")
    micro_batch_size: Positive = Field(description="Samples per forward pass of one replica; limited by core memory.")
    learning_rate: float = Field(gt=0, description="Peak learning rate; warms up and falls linearly to 0.")
    warmup_steps: Count = Field(description="Steps over which the learning rate rises from 0.")
    weight_decay: float = Field(ge=0, description="AdamW's weight decay.")
    layer_norm_weight_decay: bool = Field(description="NxDT's do_layer_norm_weight_decay, with its meaning there.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        description="AdamW's decay rates of the two moments."
    )
    gradient_clip: float = Field(gt=0, description="Largest norm of the gradient; larger ones are scaled down.")
    seed: Positive = Field(description="Seed of the random numbers; NeMo refuses 0.")
    packing: bool = Field(
        description="Pack rows into full samples; NxDT then trains on prompts too and drops rows of seq_length or more."
    )
    checkpoint_every: Positive = Field(description="Steps between checkpoints.")
    keep_checkpoints: Annotated[int, AfterValidator(keep_two)] = Field(
        description="Newest checkpoints kept on disk: 2 or more, -1 for all."
    )
    save_bf16: bool = Field(description="Write the checkpoint's weights in bfloat16 instead of float32.")
    async_checkpointing: bool = Field(description="Write checkpoints in the background; needs far more host memory.")
    precision: Literal["mixed_precision", "bf16SR", "fp32", "autocast"] = Field(
        description="NxDT's precision type. (mixed_precisionSR is refused by NxDT's own launcher.)"
    )
    log_every: Positive = Field(description="Steps between logged losses.")
    log_norms: bool = Field(description="Log the norms of parameters and gradients.")
    tensorboard: bool = Field(description="Write TensorBoard files next to the checkpoints.")
    flash_attention: bool = Field(description="Use the flash attention kernel; seq_length a multiple of 2048.")
    activations_checkpoint: ActivationsCheckpoint = Field(description="Recomputation of activations.")
    compiler_flags: str = Field(
        description="Flags for neuronx-cc; never --cache_dir, which would defeat compile.cache."
    )
    runtime: Runtime = Field(description="Settings of the Neuron runtime.")
    experiment: Name | None = Field(None, description="Experiment name in NxDT's logs; null: the recipe's name.")
    checkpoint_name: Name | None = Field(
        None, description="Beginning of the checkpoints' names; null: the experiment's name."
    )


class Compile(Section):
    """Compilation ahead of training."""

    mode: Literal["aot", "jit"] = Field(
        description="aot: compile all graphs in a job of its own first; jit: go straight to training."
    )
    cache: Folder | None = Field(
        None, description="Folder of the compiler cache, visible to all nodes; null: run folder."
    )


class Convert(Section):
    """Conversion between Hugging Face and NxD checkpoints."""

    engine: Literal["native", "nxdt"] = Field(
        description="native: this project's converter; nxdt: the toolchain's script."
    )
    qkv: Qkv = Field(
        description="How q, k and v are stored; auto: fused when kv_heads differ from heads, else coalesced."
    )
    array: Positive = Field(
        description="Jobs that share the native conversion to NxD, each on a node of its own; when there are several, "
        "one more verifies the whole. May change between two starts of one run.",
    )
    workers: Positive | None = Field(
        None,
        description="Processes of a native conversion; null: one per CPU of its job. May change between two starts of "
        "one run.",
    )


class Export(Section):
    """The fine-tuned model as it is handed over."""

    chat_template: str | None = Field(None, description="Chat template (Jinja text); null: the base model's.")
    single_file: bool = Field(description="Also write all weights as one checkpoint.pt, as the tutorial does.")
    dtype: FloatDtype | None = Field(None, description="Data type of the weights; null: the base model's.")


class Evaluate(Section):
    """Comparison of base and tuned model on held-out rows."""

    rows: Positive = Field(description="Held-out rows used for the loss.")
    samples: Count = Field(description="Prompts whose answers are shown.")
    max_new_tokens: Positive = Field(description="Longest answer, in tokens.")


class StageResources(Section):
    """What one stage's job asks Slurm for."""

    time: Duration = Field(description="Time limit, HH:MM:SS or D-HH:MM:SS.")
    cpus_per_task: Positive = Field(description="CPUs per node (one task per node).")
    memory: Memory | None = Field(None, description="Memory per node with unit, such as 64G; null: Slurm's default.")
    exclusive: bool = Field(False, description="Have the nodes alone.")


class TrainResources(StageResources):
    """What the training job asks Slurm for."""

    signal_before_end: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Seconds before the time limit at which the trainer is sent SIGUSR1, which asks it for a "
        "checkpoint; Slurm may be a minute early; null: no signal. The rehearsal's trainer saves one and ends. In what "
        "was read of NxDT nothing handles the signal: it goes on to the time limit, unharmed.",
    )


class Resources(Section):
    """What the jobs ask Slurm for. May change between two starts of one run."""

    nodes: Positive = Field(description="Nodes of the compile and train jobs; the other stages use one.")
    partition: SlurmWord | None = Field(None, description="Slurm partition; null: the cluster's default.")
    account: SlurmWord | None = Field(None, description="Slurm account.")
    qos: SlurmWord | None = Field(None, description="Slurm quality of service.")
    reservation: SlurmWord | None = Field(None, description="Slurm reservation.")
    constraint: SlurmWord | None = Field(None, description="Node features asked for.")
    nodelist: SlurmWord | None = Field(None, description="Nodes that must be used.")
    exclude: SlurmWord | None = Field(None, description="Nodes that must not be used.")
    requeue: bool | None = Field(False, description="Let Slurm restart a job by itself; null: the cluster's default.")
    mail_type: SlurmWord | None = Field(None, description="Events Slurm mails about, such as END,FAIL.")
    mail_user: SlurmWord | None = Field(None, description="Address of those mails.")
    convert: StageResources = Field(description="HF to NxD conversion.")
    compile: StageResources = Field(description="Ahead-of-time compilation.")
    train: TrainResources = Field(description="Training.")
    export: StageResources = Field(description="NxD to HF conversion and verification.")
    evaluate: StageResources = Field(description="Held-out loss and samples.")


class Attempts(Section):
    """What happens when a job ends without success, or does not start. May change between two starts of one run.

    The numbers are new attempts per stage and kind of end, over the whole life of the run; training goes on from its
    last complete checkpoint. Wrong input, wrong settings and jobs cancelled from outside are never tried again.
    """

    hardware: Count = Field(description="New attempts, without that node, after failures of nodes.")
    preemption: Count = Field(description="New attempts after jobs of higher priority took the nodes.")
    time_limit: Count = Field(
        description="New attempts at training after its time limit, each only if the last one saved a new checkpoint."
    )
    capacity: Count = Field(description="New attempts after the cloud had no instances to give.")
    transient: Count = Field(description="New attempts after failures that pass by themselves.")
    ambiguous: Count = Field(description="New attempts, on another node where one is known, after unclear failures.")
    capacity_delay: Duration = Field(description="Wait before an attempt after a lack of capacity, HH:MM:SS.")
    transient_delay: Duration = Field(description="Wait before an attempt after a failure that passes, HH:MM:SS.")
    hopeless_grace: Duration = Field(
        description="How long a job may wait for a reason that does not pass by itself before it is cancelled and the "
        "run stops, HH:MM:SS."
    )
    max_wait: Duration | None = Field(
        description="How long a job may wait for whatever reason before the run warns, once, HH:MM:SS; null: for ever."
    )


class Recipe(Section):
    """One fine-tuning, from base model to export."""

    name: Name = Field(description="Short name of the recipe; part of run names.")
    description: str = Field("", description="What it is for, in a sentence.")
    instance_type: InstanceName = Field(description="Kind of node that trains; rehearsal: CPUs that pretend.")
    model: Model = Field(description="Base model: where it comes from, which revision.")
    parallelism: Parallelism = Field(description="Layout over the cores: tensor and pipeline degrees, ZeRO-1.")
    dataset: Dataset = Field(description="Rows to learn from: where they come from, their files and columns.")
    training: Training = Field(description="Trainer: steps, batches, learning rate, checkpoints, precision.")
    compile: Compile = Field(description="Compilation ahead of training, and its cache.")
    convert: Convert = Field(description="Conversion between Hugging Face and NxD checkpoints.")
    export: Export = Field(description="The tuned model as it is handed over: chat template, data type.")
    evaluate: Evaluate = Field(description="Comparison of base and tuned model: held-out rows, sample answers.")
    resources: Resources = Field(description="What the jobs ask Slurm for: nodes, partition, time limits.")
    attempts: Attempts = Field(description="What happens when a job fails or does not start: new attempts, waits.")

    @property
    def experiment(self) -> str:
        return self.training.experiment or self.name

    @property
    def checkpoint_name(self) -> str:
        return self.training.checkpoint_name or self.experiment
