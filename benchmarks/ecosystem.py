"""Whether the libraries that people use run with this package: small random models, trained and packed, on a CPU.

    make ecosystem                                     # makes an environment of its own with the libraries
    python -m benchmarks.ecosystem [--only trl-sft timm ...] [--inductor] [--out FILE]

Each subject has a process of its own; one whose library is not installed is skipped. Captured graphs run as they are,
--inductor compiles them. Prints a table and exits with 1 where a subject failed. What a subject is checked for:

layers: how many weights `pack_` packs, or how many products of a step are quantised: exactly the number that it should.
SQNR: of the outputs under `nvfp4` beside the same weights in float32: at least `LEAST_SQNR` dB, which wrong products
    miss, and less than bf16 has, which unquantised products have. "beside packed" has the packed model, run eagerly, in
    the place of the float32 one: at least `LEAST_AGREEMENT` dB. None where all bits are equal.
loss: before and after some steps of AdamW under a training recipe, or of LoRA over packed weights: it falls by
    `FALLS` of itself. Beside it stands where the same steps end without this package, in bf16, which no bound holds it
    to: few steps from random weights follow the noise of gradients too.
trained: the parameters that changed in training are those that should.
"""

import importlib
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4compile
from benchmarks import common, zoo
from benchmarks.architectures import ARCHITECTURES, HEADS, IDS, TEXTS, VOCABULARY, Architecture, images
from fp4compile.weights.linear import PackedLinear
from tests.helpers import without_codegen

LEAST_SQNR, LEAST_AGREEMENT = 8.0, 25.0  # dB
FALLS = 0.02  # of the first loss
STEPS = 8
NOT_TRAINED = ("transformers: RWKV",)  # its loss rises in bf16 without this package
TIMEOUT = 1200  # seconds of one subject
WORDS = 120  # of the tokenizer's vocabulary


def check(problems: list[str], holds: bool, text: str) -> None:
    """Note a problem where something does not hold."""
    if not holds:
        problems.append(text)


# ---------------------------------------------------------------- models that are called


def latents_of_videos() -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(TEXTS, 16, 2, 8, 8), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(TEXTS, 16, 64)}  # fmt: skip


# By subject: the family, how many of its weights are packed, and how many products of a forward pass are quantised.
FAMILIES: dict[str, tuple[Architecture, int, int]] = {
    "diffusers: Flux": (ARCHITECTURES["Flux"], 26, 26),
    "diffusers: SD3": (ARCHITECTURES["Stable Diffusion 3"], 31, 31),
    "diffusers: Wan": (
        Architecture("WanTransformer3DModel", latents_of_videos, HEADS | {
            "text_dim": 64, "freq_dim": 32, "ffn_dim": 160, "num_layers": 2}, package="diffusers"), 25, 25),
    "transformers: Whisper": (ARCHITECTURES["Whisper"], 32, 32),
    "transformers: T5": (ARCHITECTURES["T5"], 36, 36),
    "transformers: Mamba": (ARCHITECTURES["Mamba"], 6, 6),
    "transformers: RWKV": (
        Architecture("RwkvForCausalLM", ARCHITECTURES["Mamba"].batch, {
            "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64,
            "rescale_every": 0,  # else inference divides weights in place
            "use_cache": False, **IDS}, "RwkvConfig"), 14, 14),
    "timm: ViT": (
        Architecture("VisionTransformer", images, {
            "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 16},
            package="timm.models"), 8, 8),
}  # fmt: skip


def of_family(name: str) -> dict[str, Any]:
    """A model's outputs under `nvfp4`, its packed layers, and training under `nvfp4_train`."""
    family, packed, quantised = FAMILIES[name]
    problems: list[str] = []
    found = zoo.inference(family)
    check(problems, found["quantised"] == quantised, f"{found['quantised']} products quantised, not {quantised}")
    check_outputs(problems, found)
    torch._dynamo.reset()
    stored = zoo.packing(family)
    check(problems, stored["layers"] == packed, f"{stored['layers']} weights packed, not {packed}")
    check(problems, bool(stored["equal"]), "saved and loaded, it has other bits")
    if name in NOT_TRAINED:
        return facts(found, stored, {}, "inference, packed and saved", problems)
    torch._dynamo.reset()
    exact = zoo.called(zoo.made(family, torch.float32), zoo.batch_of(family, torch.float32))
    torch.manual_seed(4)
    target, batch = exact + exact.std() * torch.randn_like(exact), zoo.batch_of(family)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return F.mse_loss(torch.cat([each.double().flatten() for each in zoo.outputs(model(**batch))]), target)

    losses = trained_twice(problems, lambda: zoo.made(family), loss_of)
    return facts(found, stored, losses, "inference, packed and saved, training", problems)


def check_outputs(problems: list[str], found: dict[str, Any]) -> None:
    """found: the figures of `zoo.inference`."""
    names = "SQNR", "bf16 SQNR", "packed SQNR"
    sqnr, plain, beside = (math.inf if found[name] is None else found[name] for name in names)
    check(problems, sqnr >= LEAST_SQNR, f"SQNR {sqnr} dB, expected at least {LEAST_SQNR}")
    check(problems, sqnr < plain - 3, f"SQNR {sqnr} dB, bf16 has {plain}: nothing was quantised")
    check(problems, beside >= LEAST_AGREEMENT, f"{beside} dB beside the packed model")


def trained_twice(
    problems: list[str], make: Callable[[], nn.Module], loss_of: Callable[[nn.Module], torch.Tensor],
    compile: Callable[[nn.Module, Any], nn.Module] = lambda model, backend: torch.compile(model, backend=backend),
) -> dict[str, Any]:  # fmt: skip
    """Losses of some steps under `nvfp4_train`, and of the same steps in bf16."""
    backend = fp4compile.backend("nvfp4_train")
    losses = [losses_of(make(), loss_of, wrap) for wrap in (lambda model: compile(model, backend), lambda model: model)]
    return check_losses(problems, *losses) | zoo.counted(backend)


def losses_of(model: nn.Module, loss_of: Callable, wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
    zoo.without_dropout(model.train())
    run, found = wrap(model), []
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(STEPS):
        loss = loss_of(run)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_losses(problems: list[str], found: list[float], plain: list[float]) -> dict[str, Any]:
    """plain: of the same steps without this package."""
    first, last, other = found[0], found[-1], plain[-1]
    check(problems, all(torch.isfinite(torch.tensor(found))), f"the loss is not finite: {found}")
    check(problems, last < (1 - FALLS) * first, f"the loss does not fall: {first:.4f} to {last:.4f}")
    check(problems, found != plain, "the losses are those of unquantised steps")
    return {"losses": [round(first, 4), round(last, 4)], "bf16 loss": round(other, 4)}


def facts(inferred: dict, stored: dict, trained: dict, ran: str, problems: list[str]) -> dict[str, Any]:
    """A subject's figures, under the names of the table."""
    return {
        "ran": ran, "packed": stored.get("layers"), "not packed": stored.get("left", {}),
        "quantised": inferred.get("quantised"), "products": inferred.get("products"), "share": inferred.get("share"),
        "left alone": inferred.get("left alone", {}), "SQNR": inferred.get("SQNR"),
        "beside packed": inferred.get("packed SQNR"), "training share": trained.get("share"),
        "losses": trained.get("losses"), "bf16 loss": trained.get("bf16 loss"), "problems": problems,
    }  # fmt: skip


# ---------------------------------------------------------------- texts


def tokenizer() -> Any:
    """A tokenizer of words w0, w1 and so on, of transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>")  # fmt: skip


def sentences(count: int, seed: int) -> list[str]:
    """Sentences that count on from a word."""
    starts = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(f"w{(start + i) % WORDS}" for i in range(6 + start % 7)) for start in starts]


# ---------------------------------------------------------------- trl


def decoder(recipe: str | None = None) -> nn.Module:
    """A small Llama, packed under a recipe."""
    model = zoo.made(ARCHITECTURES["Llama"])
    if recipe is not None:
        fp4compile.pack_(model, recipe, progress=False)
    return model


def tuned(kind: str, config: dict[str, Any], rows: list[dict[str, str]], *, lora: bool) -> dict[str, Any]:
    """A trainer of trl with the model compiled in place; LoRA over packed weights, or all parameters. And in bf16."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    problems: list[str] = []
    recipe = "nvfp4" if lora else "nvfp4_train"
    losses, trained, counted = [], {}, {}
    for compiled in (True, False):
        torch.manual_seed(0)
        model = decoder("nvfp4" if lora and compiled else None)
        packed = sum(isinstance(module, PackedLinear) for module in model.modules())
        backend = fp4compile.backend(recipe)
        options = {"peft_config": LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")} if lora else {}
        with tempfile.TemporaryDirectory() as folder:
            args = getattr(trl, f"{kind}Config")(
                output_dir=folder, max_steps=STEPS, per_device_train_batch_size=8, report_to=[],
                learning_rate=1e-2 if lora else 5e-3, logging_steps=1, save_strategy="no", bf16=True, use_cpu=True,
                disable_tqdm=True, seed=0, lr_scheduler_type="constant", gradient_checkpointing=False, **config,
            )  # fmt: skip
            trainer = getattr(trl, f"{kind}Trainer")(
                model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **options
            )
            before = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
            if compiled:
                trainer.model.compile(backend=backend)
            trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if compiled:
            counted, layers = zoo.counted(backend), packed
            trained = {name for name, each in trainer.model.named_parameters() if not torch.equal(each, before[name])}
            expected = {name for name in before if "lora_" in name} if lora else set(before)
            check(
                problems, trained == expected, f"trained are {sorted(trained ^ expected)[:4]}, which should not, or not"
            )
    check(problems, layers == (14 if lora else 0), f"{layers} weights packed, not 14")
    check(
        problems, (counted["quantised"] or 0) >= 14, f"{counted['quantised']} products quantised, at least 14 expected"
    )
    told = check_losses(problems, *losses)
    ran = f"{kind}Trainer, " + ("LoRA over packed weights" if lora else "all parameters")
    return facts(counted, {"layers": layers}, told | {"share": counted["share"]}, ran, problems)


def trl_sft() -> dict[str, Any]:
    return tuned("SFT", {"packing": True, "max_length": 32}, [{"text": text} for text in sentences(24, 0)], lora=True)


def trl_sft_full() -> dict[str, Any]:
    return tuned("SFT", {"packing": True, "max_length": 32}, [{"text": text} for text in sentences(24, 0)], lora=False)


def trl_dpo() -> dict[str, Any]:
    pairs = zip(sentences(8, 0), sentences(8, 1), sentences(8, 2), strict=True)
    rows = [{"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {other}"} for prompt, chosen, other in pairs]
    return tuned("DPO", {"max_length": 48, "beta": 0.5}, rows, lora=True)


# ---------------------------------------------------------------- torchtitan


def torchtitan(flavor: str) -> dict[str, Any]:
    """The debug model of a flavor, each block compiled in place, as torchtitan does."""
    package = importlib.import_module(f"torchtitan.models.{flavor}")
    from torchtitan.models.common.attention import ScaledDotProductAttention

    def make(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        config = getattr(package, f"{flavor}_configs")["debugmodel"](attn_backend="varlen")
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others want a GPU
        torch.manual_seed(0)
        model = config.build()
        model.init_states(buffer_device=torch.device("cpu"))
        return model.bfloat16().to(dtype).eval()

    def in_blocks(model: nn.Module, backend: Any) -> nn.Module:
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
        return model

    problems: list[str] = []
    tokens = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, -1)
    called = {dtype: zoo.called(make(dtype), {"tokens": tokens, "positions": positions})
              for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip
    backend = fp4compile.backend("nvfp4")
    outputs = zoo.called(in_blocks(make(), backend), {"tokens": tokens, "positions": positions})
    exact = called[torch.float32]
    found = zoo.counted(backend) | {"SQNR": zoo.sqnr(exact, outputs), "packed SQNR": None,
                                    "bf16 SQNR": zoo.sqnr(exact, called[torch.bfloat16])}  # fmt: skip
    check_outputs(problems, found)
    check(problems, found["graphs"] == 1, f"{found['graphs']} graphs: blocks do not share one")
    check(problems, found["quantised"] == 5, f"{found['quantised']} products of a block quantised, not 5")
    stored = fp4compile.pack_(make(), "nvfp4", progress=False)
    torch._dynamo.reset()

    def loss_of(model: nn.Module) -> torch.Tensor:
        logits = model(tokens, positions)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    losses = trained_twice(problems, make, loss_of, in_blocks)
    told = {"layers": len(stored.quantised), "left": stored.reasons()}
    return facts(found, told, losses, "blocks compiled in place: inference, training", problems)


# ---------------------------------------------------------------- sentence-transformers, Lightning


def sentence_transformers() -> dict[str, Any]:
    """Embeddings of a packed model and of a compiled one, and its trainer."""
    import sentence_transformers as library
    from datasets import Dataset
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules.pooling import Pooling
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    bert = BertModel(BertConfig(**ARCHITECTURES["BERT"].small))
    texts, problems = sentences(16, 0), []
    with tempfile.TemporaryDirectory() as folder:
        bert.save_pretrained(folder)
        tokenizer().save_pretrained(folder)

        def make(dtype: str = "bfloat16") -> Any:
            made = library.SentenceTransformer(modules=[Transformer(folder), Pooling(64)], device="cpu")
            return made.bfloat16().to(getattr(torch, dtype))

        def encoded(model: Any) -> torch.Tensor:
            return model.encode(texts, convert_to_tensor=True).double().flatten()

        exact, plain, model = encoded(make("float32")), encoded(make()), make()
        backend = fp4compile.backend("nvfp4")
        model.compile(backend=backend)
        outputs, packed = encoded(model), make()
        stored = fp4compile.pack_(packed, "nvfp4", progress=False)
        beside = encoded(packed)
        found = zoo.counted(backend) | {"SQNR": zoo.sqnr(exact, outputs), "bf16 SQNR": zoo.sqnr(exact, plain),
                                        "packed SQNR": zoo.sqnr(beside, outputs)}  # fmt: skip
        check_outputs(problems, found)
        packed_layers = len(stored.quantised)  # one of which, BERT's pooler, does not run
        check(problems, packed_layers == 13, f"{packed_layers} weights packed, not 13")
        check(problems, found["quantised"] == 12, f"{found['quantised']} products quantised, not 12")
        rows = [{"anchor": one, "positive": one.replace("w1", "w2")} for one in sentences(64, 1)]
        losses, counted = [], {}
        for compiled in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model, training = make("float32"), fp4compile.backend("nvfp4_train")
            zoo.without_dropout(model)
            if compiled:
                model.compile(backend=training)
            args = library.SentenceTransformerTrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=2e-3, logging_steps=1,
                report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
            )  # fmt: skip
            trainer = library.SentenceTransformerTrainer(
                model, args, train_dataset=Dataset.from_list(rows),
                loss=MultipleNegativesRankingLoss(model),
            )  # fmt: skip
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            counted = counted or zoo.counted(training)
    told = check_losses(problems, *losses) | counted
    kept = {"layers": len(stored.quantised), "left": stored.reasons()}
    return facts(found, kept, told, "encode: compiled and packed; its trainer", problems)


def lightning() -> dict[str, Any]:
    """`Trainer.fit` of a module whose network is compiled in place."""
    import lightning as library

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = decoder(), []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            logits = self.net(batch[0]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[0][:, 1:].flatten())
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 5e-3)

    problems: list[str] = []
    data = torch.utils.data.TensorDataset(torch.arange(32).remainder(16).expand(32, -1).contiguous())
    losses, backend = [], fp4compile.backend("nvfp4_train")
    for compiled in (True, False):
        torch.manual_seed(0)
        module = Module()
        if compiled:
            module.net.compile(backend=backend)
        trainer = library.Trainer(
            max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        losses.append(module.losses)
    found = zoo.counted(backend)
    check(problems, found["quantised"] == 3 * 14, f"{found['quantised']} products quantised, not 42")
    return facts(found, {}, check_losses(problems, *losses) | found, "Trainer.fit, self.log in the step", problems)


# ---------------------------------------------------------------- subjects


@dataclass(frozen=True)
class Subject:
    """packages: what has to be installed; the first one's version is told. measure: returns the `facts`."""

    packages: tuple[str, ...]
    measure: Callable[[], dict[str, Any]]


SUBJECTS = {
    "trl: SFT, LoRA": Subject(("trl", "datasets", "peft"), trl_sft),
    "trl: SFT": Subject(("trl", "datasets", "peft"), trl_sft_full),
    "trl: DPO, LoRA": Subject(("trl", "datasets", "peft"), trl_dpo),
    "torchtitan: Llama 3": Subject(("torchtitan",), lambda: torchtitan("llama3")),
    "torchtitan: Qwen3": Subject(("torchtitan",), lambda: torchtitan("qwen3")),
    "sentence-transformers": Subject(("sentence_transformers", "datasets"), sentence_transformers),
    "Lightning": Subject(("lightning",), lightning),
    **{
        name: Subject((family.package.partition(".")[0],), lambda name=name: of_family(name))
        for name, (family, _, _) in FAMILIES.items()
    },
}


def record_of(name: str, inductor: bool = False) -> dict[str, Any]:
    """A subject's row. inductor: whether it generates code."""
    subject = SUBJECTS[name]
    missing = [package for package in subject.packages if find_spec(package) is None]
    if missing:
        return {"subject": name, "skipped": f"{', '.join(missing)} is not installed"}
    _mend_torchvision()
    told = {"subject": name, "package": f"{subject.packages[0].replace('_', '-')} {version(subject.packages[0])}"}
    with pytest.MonkeyPatch.context() as patch:
        if not inductor:
            without_codegen.install(patch)
        try:
            return told | subject.measure()
        except Exception as error:  # noqa: BLE001 (whatever a library raises)
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            return told | {"problems": [f"{type(error).__name__}: {lines[0] if lines else ''}"]}


def _mend_torchvision() -> None:
    """Declare the operators for lack of which torchvision cannot be imported beside a torch without its kernels."""
    if find_spec("torchvision") is None:
        return
    with suppress(OSError):
        torch.ops.load_library(str(next(Path(find_spec("torchvision").origin).parent.glob("_C*.so"))))
    if not hasattr(torch.ops.torchvision, "nms"):
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for operator in ("nms", "qnms"):
            _KEPT[-1].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_KEPT: list[Any] = []


def in_a_process(name: str, inductor: bool) -> dict[str, Any]:
    found = zoo.apart("ecosystem", name, inductor, TIMEOUT)
    return {"subject": name, "problems": [found]} if isinstance(found, str) else found


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table that is printed."""
    keys = ("subject", "package", "packed", "quantised", "products", "share", "SQNR", "beside packed", "losses",
            "bf16 loss")  # fmt: skip
    return {key: row.get(key) for key in keys} | {"failed": "; ".join(row.get("problems", [])) or row.get("skipped")}


def main(arguments: Iterable[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("--inductor", action="store_true", help="generate code")
    parser.set_defaults(device="cpu")
    args = parser.parse_args(None if arguments is None else list(arguments))
    rows = {}
    if args.out and args.out.exists():
        rows = {row["subject"]: row for row in json.loads(args.out.read_text(encoding="utf-8"))["rows"]}
    for name in args.only:
        rows[name] = in_a_process(name, args.inductor)
        print(common.table([shown(rows[name])]).splitlines()[-1], file=sys.stderr, flush=True)
    print(common.table([shown(rows[name]) for name in args.only]))
    kept = [rows[name] for name in SUBJECTS if name in rows]
    common.write(args, {"inductor": args.inductor}, {"rows": kept})
    return int(any(rows[name].get("problems") for name in args.only))


if __name__ == "__main__":
    sys.exit(main())
