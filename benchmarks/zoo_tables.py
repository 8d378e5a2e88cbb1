"""The tables of results/zoo_cpu.json and results/ecosystem.json: what the recipes do to a small model of each of many
families, and whether libraries run with it. Needs nothing but Python."""

from typing import Any

from benchmarks.cells import Cells, number


def families(content: dict[str, Any]) -> Cells:
    """Every family: what is quantised, and how the parts ended."""
    rows = [
        [row["family"], *_share_and_sqnr(row["inference"]), *_training(row["training"]), _generated(row["generation"]),
         _packed(row["packing"])]
        for row in content["rows"] if "skipped" not in row and "error" not in row
    ]  # fmt: skip
    header = ["family", "inference: FLOPs quantised", "SQNR, dB", "training: FLOPs quantised",
              "cosine of the gradients", "generated as packed", "packed, saved, loaded"]  # fmt: skip
    return [header, *rows]


def left_alone(content: dict[str, Any]) -> Cells:
    """Every family: the shares of FLOPs that stay in high precision, by reason."""
    rows = [
        [row["family"], *(_reasons(row[part]) for part in ("inference", "training"))]
        for row in content["rows"] if "skipped" not in row and "error" not in row
    ]  # fmt: skip
    return [["family", "left alone in inference", "left alone in training"], *rows]


def beside(content: dict[str, Any]) -> Cells:
    """Every family: the class, and what its figures are read beside."""
    rows = [
        [row["family"], f"`{row['class']}`", row["package"], f"{row['weights']:,}",
         row["inference"].get("graphs"), number(row["inference"].get("bf16 SQNR"), 1), _beside_packed(row["inference"]),
         number(row["training"].get("bf16 cosine"), 4)]
        for row in content["rows"] if "skipped" not in row and "error" not in row
    ]  # fmt: skip
    header = ["family", "class", "of", "weights", "graphs", "bf16: SQNR, dB", "beside the packed model, dB",
              "bf16: cosine of the gradients"]  # fmt: skip
    return [header, *rows]


def libraries(content: dict[str, Any]) -> Cells:
    """Every subject of `benchmarks.ecosystem`: what ran, and what was quantised."""
    rows = [
        [row["subject"], row["package"].partition(" ")[2], row.get("ran"),
         _of(row.get("quantised"), row.get("products")), None if row.get("share") is None else _share(row),
         row.get("packed"), number(row.get("SQNR"), 1),
         " to ".join(number(loss, 2) or "" for loss in row.get("losses") or ()), number(row.get("bf16 loss"), 2),
         "; ".join(row["problems"]) or "passed"]
        for row in content["rows"] if "skipped" not in row
    ]  # fmt: skip
    header = ["library", "version", "what ran", "products quantised", "of their FLOPs", "weights packed", "SQNR, dB",
              "loss", "loss unquantised", "checks"]  # fmt: skip
    return [header, *rows]


def left_in_libraries(content: dict[str, Any]) -> Cells:
    """Every subject of `benchmarks.ecosystem`: the shares of FLOPs left alone, and the weights that are not packed."""
    rows = [
        [row["subject"], _reasons(row),
         "; ".join(f"{reason}: {count}" for reason, count in (row.get("not packed") or {}).items())]
        for row in content["rows"] if "skipped" not in row
    ]  # fmt: skip
    return [["library", "left alone", "weights not packed"], *rows]


def _of(some: int | None, whole: int | None) -> str | None:
    return None if some is None else f"{some} of {whole}"


def _share(part: dict[str, Any]) -> str:
    return f"{number(100 * part['share'], 1)} %"


def _share_and_sqnr(part: dict[str, Any]) -> list[str | None]:
    return [part["error"], None] if "error" in part else [_share(part), number(part["SQNR"], 1)]


def _training(part: dict[str, Any]) -> list[str | None]:
    return [part["error"], None] if "error" in part else [_share(part), number(part["cosine"], 3)]


def _generated(part: dict[str, Any] | None) -> str | None:
    if part is None:
        return None
    if "error" in part:
        return part["error"]
    return f"{part['tokens']}, not compared" if part["equal"] is None else f"{part['equal']} of {part['tokens']}"


def _packed(part: dict[str, Any]) -> str:
    if "error" in part:
        return part["error"]
    if not part["layers"]:
        return f"nothing is packed ({', '.join(part['left'])})"
    return "equal" if part["equal"] else "other bits"


def _beside_packed(part: dict[str, Any]) -> str | None:
    if "packed SQNR" not in part:
        return None
    return "equal" if part["packed SQNR"] is None else number(part["packed SQNR"], 1)


def _reasons(part: dict[str, Any]) -> str:
    return "; ".join(f"{reason.split(':')[0]} {number(100 * share, 1)} %"
                     for reason, share in part.get("left alone", {}).items() if share >= 0.0005)  # fmt: skip
