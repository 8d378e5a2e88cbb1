"""Tasks of lm-eval for a model whose weights are packed: what a recipe costs on them.

    pip install fp4compile "lm-eval[hf]>=0.4.13"
    python examples/evaluate_packed.py meta-llama/Llama-3.1-8B --recipe nvfp4_weight_only --tasks mmlu arc_easy
    python examples/evaluate_packed.py MODEL --recipe nvfp4_weight_only --method gptq --scales mse --samples text.txt

MODEL is a name or a folder that transformers reads. --samples is a text file, a paragraph a line, from which GPTQ
learns: text like that of the tasks, and none of the tasks' own. Without --recipe the model stays as it is, to compare
with. Prints lm-eval's table; --out writes its results as JSON.
"""

import argparse
import json
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import fp4compile

LENGTH = 2048  # tokens of a sample at most


def samples(file: Path, tokenizer, device: str) -> list[dict[str, torch.Tensor]]:
    """The paragraphs of a file as batches of one sequence."""
    paragraphs = filter(None, map(str.strip, file.read_text(encoding="utf-8").splitlines()))
    return [tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt").to(device) for text in paragraphs]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--recipe", choices=fp4compile.recipes())
    parser.add_argument("--method", default="nearest", choices=("nearest", "gptq"))
    parser.add_argument("--scales", default="amax", help="weight_scales of the recipe")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["mmlu"])
    parser.add_argument("--include", help="a folder of tasks besides lm-eval's own")
    parser.add_argument("--limit", type=int, help="questions of a task at most")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(options.device).eval()
    if options.recipe:
        recipe = fp4compile.backend(options.recipe, weight_method=options.method, weight_scales=options.scales).recipe
        batches = options.samples and samples(options.samples, tokenizer, options.device)
        print(fp4compile.pack_(model, recipe, batches=batches))
    # Packed layers run uncompiled, with the bits of the compiled model: the questions of a task have many lengths, for
    # each of which a compiled model would be compiled again.
    found = lm_eval.simple_evaluate(
        HFLM(model, tokenizer=tokenizer, batch_size=options.batch), tasks=options.tasks, limit=options.limit,
        task_manager=TaskManager(include_path=options.include), log_samples=False,
    )  # fmt: skip
    print(make_table(found))
    if options.out:
        options.out.write_text(json.dumps(found["results"], indent=1) + "\n")


if __name__ == "__main__":
    main()
