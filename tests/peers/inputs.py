"""The inputs of a comparison: documents of the store in one packed row, anchors, and which slots count."""
import contextlib

import torch

# As the training fixtures say it (tests/golden/train): which slots, which label, what the sums are divided by.
RULES = {"deepspec": {"slots": "label_prefix", "label": "data", "denominator": "count"},
         "speculators": {"slots": "row_mask", "label": "target_argmax", "denominator": "count"}}


def some_of(found):
    """The first and last and some between."""
    return sorted(set(found[:2] + found[2:-4:max(1, len(found) // 3)] + found[-4:]))


class Case:
    """`supervised` [A, B] by DESIGN 4. `labels` [A, B]: draft ids of the data's tokens, -1 where not kept."""

    def __init__(self, store, model, rules):
        self.rules, self.block, self.from_anchor = rules, model.block_size, model.config.sample_from_anchor
        ends = store["lengths"].cumsum(0).tolist()
        spans = [slice(end - n, end) for end, n in zip(ends, store["lengths"].tolist())]
        # Two turns; a long answer; and one whose mask begins at its first token, for an anchor without any context.
        chosen = [(spans[1], False), (spans[3], False), (spans[0], True)]
        # Behind them a block of padding (document -1), since speculators lets no block run over the row's end.
        join = lambda parts, value: torch.cat(parts + [torch.full((self.block, *parts[0].shape[1:]), value, dtype=parts[0].dtype)])[None]
        mask = [torch.ones_like(store["mask"][s]).long() if whole else store["mask"][s].long() for s, whole in chosen]
        self.lengths = [s.stop - s.start for s, _ in chosen]
        self.row = {"hidden_states": join([store["states"][s, :-1].flatten(1).float() for s, _ in chosen], 0.0), "input_ids": join([store["tokens"][s].long() for s, _ in chosen], 0),
                    "loss_mask": join(mask, 0), "verifier_last_hidden_states": join([store["states"][s, -1].float() for s, _ in chosen], 0.0),
                    "document_ids": join([torch.full((n,), i) for i, n in enumerate(self.lengths)], -1), "position_ids": join([torch.arange(n) for n in self.lengths], 0)}
        self.choose(mask)
        draft_id = torch.arange(model.verifier_vocab_size)
        if model.use_draft_vocab:
            draft_id = torch.full_like(draft_id, -1)
            draft_id[torch.arange(model.draft_vocab_size) + model.d2t] = torch.arange(model.draft_vocab_size)
        ids = draft_id[self.row["input_ids"][0]]
        ids = torch.cat([ids, ids[-1:]])
        self.labels = torch.stack([ids[a + self.from_anchor:a + self.from_anchor + self.block] for a in self.anchors.tolist()])

    def choose(self, masks):
        first = 0 if self.from_anchor else 1
        flat, rows, supervised, begin = self.row["loss_mask"][0].tolist(), [], [], 0
        for mask in masks:
            mask, deepspec = mask.tolist(), self.rules == "deepspec"
            candidates = [p for p in range(len(mask)) if mask[p] and (not deepspec or p + 1 < len(mask) and mask[p + 1])]
            for p in some_of(candidates):
                slots = [False] * self.block
                for k in range(first, self.block):
                    label = p + k + (1 if self.from_anchor else 0)
                    if deepspec:  # in the document, in its mask, and so every slot before
                        if label >= len(mask) or not mask[label]:
                            break
                        slots[k] = True
                    else:  # the mask of the packed row, whatever document it is
                        slots[k] = bool(flat[begin + p + k])
                rows.append(begin + p)
                supervised.append(slots)
            begin += len(mask)
        self.anchors, self.supervised = torch.tensor(rows), torch.tensor(supervised)

    def fixture(self):
        """The row as tests/golden_train.cc reads it."""
        names = {"input_ids": "input_ids", "loss_mask": "loss_mask", "document_ids": "document_ids", "hidden_states": "hidden_states", "verifier_last_hidden_states": "last_hidden_states"}
        return {"in." + ours: self.row[theirs] for theirs, ours in names.items()} | {"in.anchors": self.anchors[None], "in.anchor_valid": torch.ones_like(self.anchors)[None]}


@contextlib.contextmanager
def changed(thing, name, value):
    saved = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, saved)


@contextlib.contextmanager
def rotary_base(model, base):
    rotary = model.rotary_emb
    half = torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
    with changed(rotary, "inv_freq", base ** -half):
        yield


def mistakes(model, case):
    """Mistakes that a comparison must not pass over, each to be made on one side only: (what, context manager)."""
    one = case.row | {"document_ids": case.row["document_ids"].clamp(max=0)}
    yield "blocks see the documents before theirs", changed(case, "row", one)
    taps = case.row["hidden_states"].unflatten(-1, (len(model.target_layer_ids), -1))
    yield "the first two taps change places", changed(case, "row", case.row | {"hidden_states": taps[..., [1, 0, *range(2, taps.shape[2])], :].flatten(-2)})
    theta = model.config.transformer_layer_config.rope_parameters["rope_theta"]
    yield f"the rotary base is {1.01 * theta:g} instead of {theta:g}", rotary_base(model, 1.01 * theta)
    if model.uses_sliding_window_attn:
        yield "the window is one token longer", changed(model, "sliding_window", model.sliding_window + 1)
        yield "sliding layers see the whole block", changed(model, "sliding_window_non_causal", True)
    if getattr(model, "markov_head", None) is not None:
        yield "the Markov head reads the token of the other layout", changed(model.config, "sample_from_anchor", not case.from_anchor)
