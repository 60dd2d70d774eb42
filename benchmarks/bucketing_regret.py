"""Regret of bucketing: at shapes between the tuned ones, the configuration the cache resolves against the best found.

python .tmp/regret.py [--budget S] [--device cuda:0] [--smoke]; writes $OUT/bucketing_regret.json
For each tunable that an op launches at a shape: the resolved configuration, the heuristic and a shortlist (the tuner's:
best known at the same or the nearest key, neighbours, random others; <= 24 in all) are checked, captured and timed
interleaved, L2-cold (liger_hw.autotune.measure). Coarse 4 rounds of all -> the best 5 and the resolved one twice, 15
rounds -> the best one and the resolved one twice, 25 fresh rounds: regret = resolved / best - 1, at least 0.
"""
import argparse, collections, json, os, platform, statistics, sys, time
import torch
from liger_hw import registry
from liger_hw.autotune import measure, persist, space, store
from liger_hw.autotune.clock import Clock
from liger_hw.autotune.journal import Journal, Past
from liger_hw.autotune.local import LocalMeasurer, _driver
from liger_hw.autotune.remote import CompilePool
from liger_hw.autotune.measure import Bench, Rejected
from liger_hw.backends import LaunchConfig, target_of

SHAPES = {
    "rms_norm": [(700, 3072), (1500, 3584), (3000, 5120), (6000, 3072), (12000, 3584), (24000, 4096), (50000, 3072)],
    "fused_add_rms_norm": [(700, 3584), (1500, 4096), (3000, 3072), (6000, 5120), (12000, 2560), (24000, 3584)],
    "swiglu": [(700, 11008), (1500, 6144), (3000, 9728), (6000, 11008), (12000, 8960), (24000, 13824)],
    "rope": [(1, 700, 32, 8, 128), (1, 1500, 28, 4, 128), (1, 3000, 24, 8, 128), (2, 3000, 32, 8, 128),
             (4, 3000, 24, 8, 64), (1, 24000, 32, 8, 128)],
    "cross_entropy": [(700, 32000), (1500, 100352), (3000, 32000), (3000, 129280), (6000, 49152), (6000, 151936)],
}
SMOKE = {"rms_norm": [(7, 96)], "swiglu": [(5, 100)], "cross_entropy": [(6, 200)], "rope": [(1, 5, 4, 2, 16)]}
parser = argparse.ArgumentParser()
parser.add_argument("--budget", type=float, default=110)
parser.add_argument("--device", default="cuda:0")
parser.add_argument("--most", type=int, default=22)
parser.add_argument("--smoke", action="store_true")
args = parser.parse_args()
began = time.monotonic()
out = os.path.join(os.environ.get("OUT", "."), "bucketing_regret.json")
persist.mute()
device = torch.device(args.device)
shapes = SMOKE if args.smoke else SHAPES
order = [(op, sizes[i]) for i in range(9) for op, sizes in shapes.items() if i < len(sizes)]
target = target_of(device)
folder = store.home(target)
scores_of = collections.defaultdict(dict)  # tunable -> key -> config -> us
if folder and (folder / "_journal.jsonl").exists():
    past = Past(Journal(folder / "_journal.jsonl"), store.triton_version())
    for (op, variant, key, kernel_hash), found in past.coarse.items():
        best = min(found.values())
        scores_of[f"{op}.{variant}"][key] = {LaunchConfig.from_json(json.loads(t)): us / best for t, us in found.items()}
print(f"{target.name}: {len(order)} shapes, {sum(len(v) for v in scores_of.values())} keys in the journal, "
      f"{sum(len(t) for _, t in registry.tables(target))} stored entries", flush=True)

def shortlist(tunable, key):
    known = {k: v for k, v in scores_of[tunable.name].items() if len(k) == len(key)}
    near = min(known, key=lambda k: sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in zip(k, key)), default=None)
    legal, _ = space.legal(tunable, target, key)
    chosen = registry._choose(tunable, target, key)
    short = space.shortlist(legal, legal[0], args.most, known.get(near, {}), f"{tunable.name}{key}")
    return chosen, legal[0], list(dict.fromkeys([chosen.config, *short]))[: args.most + 2]

pool = None
plans = {}
tracing_keys = {}
if device.type != "cpu":
    pool = CompilePool(target.to_json(), max(1, min(15, (os.cpu_count() or 2) - 1)))

def recipe_of(op, sizes, variant, config):
    from dataclasses import replace
    return json.dumps([op, variant, sizes, replace(config, ctas_per_mp=0).to_text()])

rows, problems = [], []

def write(final=False):
    def summary(values):
        values = sorted(values)
        return {} if not values else {"count": len(values), "median": round(statistics.median(values), 5),
            "mean": round(statistics.fmean(values), 5), "p90": round(values[min(len(values) - 1, int(0.9 * len(values)))], 5), "worst": round(values[-1], 5)}
    shaped = collections.defaultdict(lambda: [0.0, 0.0])
    for r in rows:
        one = shaped[r["op"], tuple(r["sizes"])]
        one[0] += r["resolved_us"]; one[1] += r["resolved_us"] / (1 + r["regret"])
    by_shape = [{"op": op, "sizes": list(s), "resolved_us": round(a, 3), "best_us": round(b, 3), "regret": round(a / b - 1, 5)} for (op, s), (a, b) in shaped.items()]
    data = {"what": "regret of bucketed keys at shapes between the tuned ones: resolved time / best measured time - 1",
        "method": __doc__, "device": target.name, "arch": target.arch, "driver": _driver(device), "torch": torch.__version__,
        "triton": store.triton_version(), "python": platform.python_version(), "dtype": "bfloat16", "date": store.today(),
        "seconds": round(time.monotonic() - began, 1), "complete": final,
        "per_kernel": summary([r["regret"] for r in rows]),
        "per_kernel_tuned_entry": summary([r["regret"] for r in rows if r["layer"] not in ("heuristic", "safe")]),
        "per_kernel_heuristic": summary([r["regret"] for r in rows if r["layer"] == "heuristic"]),
        "per_kernel_fwd_bwd_only": summary([r["regret"] for r in rows if r["variant"] in ("fwd", "bwd")]),
        "per_shape": summary([r["regret"] for r in by_shape]), "by_shape": by_shape, "rows": rows, "problems": problems}
    with open(out, "w") as file:
        json.dump(data, file, indent=1)
    return data

def timed(stage, arms, rounds):
    return [statistics.median(t) for t in stage.time(arms, rounds)]

with Clock(device) as clock:
    # what is launched, so that compilers can start early
    if pool is not None:
        from liger_hw.autotune import plan as planning
        for op, sizes in order:
            try:
                for variant, key in planning.traced(target)(op, sizes, "bfloat16"):
                    tunable = registry._tunables[f"{op}.{variant}"]
                    for config in shortlist(tunable, key)[2]:
                        pool.submit(recipe_of(op, sizes, variant, config), [op, list(sizes), "bfloat16", variant, config.to_json()])
            except Exception as error:
                print(f"trace {op} {sizes}: {type(error).__name__}: {error}", flush=True)
        print(f"planned after {time.monotonic() - began:.0f} s", flush=True)
    for op, sizes in order:
        if time.monotonic() - began > args.budget:
            problems.append(f"{op} {sizes}: not measured, the budget is spent")
            continue
        bench = None
        torch.cuda.empty_cache() if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 60e9 else None
        try:
            bench = Bench(registry.get_op(op), tuple(sizes), torch.bfloat16, clock)
        except Exception as error:
            problems.append(f"{op} {sizes}: {type(error).__name__}: {error}"); continue
        for (variant, key), _ in list(bench.tunables().items()):
            at = time.monotonic()
            tunable = registry._tunables[f"{op}.{variant}"]
            chosen, heuristic, configs = shortlist(tunable, key)
            stage = bench.stage(variant, key)
            arms, refused = {}, 0
            for config in configs:
                if pool is not None and "error" in pool.wait(recipe_of(op, sizes, variant, config)) if recipe_of(op, sizes, variant, config) in getattr(pool, "_results", {}) else False:
                    refused += 1
                    continue
                try:
                    arms[config] = stage.prepare(config)
                except Rejected:
                    refused += 1
                if len(arms) == 1:
                    at = time.monotonic()  # the first one may wait for compilers
                if time.monotonic() - at > 8:
                    break
            mine = arms.get(chosen.config)
            if mine is None:
                problems.append(f"{op}.{variant} {sizes}: the resolved configuration cannot be timed")
                continue
            coarse = dict(zip(arms, timed(stage, list(arms.values()), 4)))
            top = sorted((c for c in arms if c != chosen.config), key=coarse.get)[:5]
            final = dict(zip(["again", chosen.config, *top], timed(stage, [mine, mine, *(arms[c] for c in top)], 15)))
            best = min((c for c in final if c != "again"), key=final.get)
            one, two = final[chosen.config], final["again"]
            regret, best_us = 0.0, min(one, two)
            if best != chosen.config and top:
                one, other, two = timed(stage, [mine, arms[best], mine], 25)
                regret, best_us = max(0.0, (one + two) / 2 / other - 1), other
                if regret == 0.0:
                    best = chosen.config
            rows.append({"op": op, "variant": variant, "sizes": list(sizes), "key": list(key), "layer": chosen.layer,
                "tuned_at": chosen.provenance.get("sizes"), "resolved": chosen.config.to_json(), "best": best.to_json(),
                "resolved_us": round((one + two) / 2, 3), "best_us": round(best_us, 3), "heuristic_us": round(coarse.get(heuristic, 0.0), 3),
                "regret": round(regret, 5), "noise": round(abs(one - two) / max(min(one, two), 1e-9), 5), "candidates": len(arms), "refused": refused, "copies": stage.copies})
            r = rows[-1]
            print(f"{op}.{variant} {'x'.join(map(str, sizes))} {r['layer']:>9} {r['resolved_us']:9.2f} us, best {r['best_us']:9.2f}, "
                  f"regret {r['regret']:.2%} (noise {r['noise']:.2%}), {len(arms)} arms, {time.monotonic() - at:.1f} s", flush=True)
            arms.clear(); stage = None; mine = None
        write()
data = write(final=not problems)
print(json.dumps({k: v for k, v in data.items() if k.startswith("per_")}, indent=0))
print(f"{len(problems)} problems: {problems[:5]}, {data['seconds']} s")
if pool is not None:
    pool.close()
