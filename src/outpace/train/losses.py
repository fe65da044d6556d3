"""What heads learn from: losses against the target's own distribution, for both kinds of heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..heads.eagle import EagleLayer
from ..heads.markov import MarkovHeads
from .samples import Samples
from .unrolled import unrolled

Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""One batch: ([depths] losses, [depths] accuracies)."""

_SURE_WEIGHT = 0.1


def lk_loss(logits: Tensor, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """a KL(p, q) + (1 - a) TV(p, q) with a = exp(-3 sum min(p, q)) (LK losses, arXiv 2602.23881), and sum min(p, q).

    logits: [..., vocab] of q. rows, probs: [..., top] the target's likeliest tokens; rows at or above the vocabulary
    cannot be guessed, and count for nothing. Both results are [...].
    """
    log_q, vocab = logits.log_softmax(-1), logits.shape[-1]
    can = rows < vocab
    p = probs * can
    own = log_q.gather(-1, rows.clamp_max(vocab - 1))
    common = torch.minimum(p, own.exp() * can).sum(-1)
    divergence = (p * (p.clamp_min(1e-9).log() - own) * can).sum(-1) / p.sum(-1).clamp_min(1e-6)
    share = torch.exp(-3 * common).detach()
    return share * divergence + (1 - share) * (1 - common), common


def of_markov(heads: MarkovHeads, samples: Samples, places: Tensor) -> tuple[Tensor, Tensor]:
    """([heads] losses, [heads] accuracies) at places t. Head k sees the hidden state of t and the token t + 1 + k, and
    guesses the target's distribution of token t + 2 + k. The confidence learns sum min(p, q)."""
    steps = torch.arange(heads.num_heads)
    logits, sureness = heads(samples.hidden[places].float(), samples.tokens[places[:, None] + 1 + steps])
    before = places + 1 + steps[:, None]  # [heads, n]: where the target says what head k shall guess
    rows = heads.rows_of(samples.top_ids[before].long())
    loss, common = lk_loss(logits, rows, samples.top_probs[before].float())
    wanted = common.detach().clamp(0, 1)
    sure = nn.functional.binary_cross_entropy_with_logits(sureness, wanted, reduction="none")
    hits = heads.token_map[logits.argmax(-1)] == samples.tokens[before + 1]
    return (loss + _SURE_WEIGHT * sure).mean(-1), hits.float().mean(-1)


def of_eagle(
    head: EagleLayer, row_of: Tensor, samples: Samples, text: int, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """([depth] sums of losses, [depth] sums of hits, [depth] counts) over one text's answer. row_of: [vocab] rows."""
    chosen = samples.text == text
    tokens, is_answer = samples.tokens[chosen], samples.is_answer[chosen]
    top_ids, top_probs = samples.top_ids[chosen].long(), samples.top_probs[chosen].float()
    sums = torch.zeros(3, depth)
    for step, logits in enumerate(unrolled(head, tokens, head.mixed(samples.hidden[chosen].float()), depth)):
        before = torch.arange(len(logits)) + 1 + step
        inside = before + 1 < len(tokens)
        before, logits = before[inside], logits[: int(inside.sum())]
        own = is_answer[before + 1]
        loss, _ = lk_loss(logits, row_of[top_ids[before]], top_probs[before])
        hits = head.token_map[logits.argmax(-1)] == tokens[before + 1]
        sums[:, step] = torch.stack([(loss * own).sum(), (hits & own).sum().float(), own.sum().float()])
    return sums[0], sums[1], sums[2]


def markov_batches(heads: MarkovHeads, samples: Samples, size: int) -> Draw:
    """Batches of `size` random places. Raises InputError where no place has labels."""
    anchors = samples.anchors(heads.num_heads)
    if len(anchors) == 0:
        raise InputError(
            f"No token of the texts has {heads.num_heads + 1} tokens of an answer behind it: there is nothing to learn."
        )

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return of_markov(heads, samples, anchors[torch.randint(len(anchors), (size,), generator=generator)])

    return draw


@torch.no_grad()
def eagle_accuracies(head: EagleLayer, samples: Samples, depth: int) -> tuple[float, ...]:
    """How often the likeliest token of each step is the text's, given the right tokens before it."""
    row_of, total = _row_of(head), torch.zeros(3, depth)
    for text in samples.text.unique().tolist():
        total += torch.stack(of_eagle(head, row_of, samples, text, depth))
    return tuple((total[1] / total[2].clamp_min(1)).tolist())


def _row_of(head: EagleLayer) -> Tensor:
    """[vocab] the row of each token; the number of rows for those that cannot be guessed."""
    found = torch.full((head.vocab_size,), len(head.token_map), dtype=torch.int64)
    found[head.token_map] = torch.arange(len(head.token_map))
    return found


def eagle_batches(head: EagleLayer, samples: Samples, size: int, depth: int) -> Draw:
    """Batches of random texts until `size` answered tokens are among them. Raises InputError where there are none."""
    counts = torch.bincount(samples.text[samples.is_answer], minlength=int(samples.text.max()) + 1)
    texts = torch.nonzero(counts > depth).flatten()
    if len(texts) == 0:
        raise InputError(f"No text has an answer of more than {depth} tokens: there is nothing to learn.")
    row_of = _row_of(head)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        total, seen = torch.zeros(3, depth), 0
        while seen < size:
            text = int(texts[torch.randint(len(texts), (1,), generator=generator)])
            total = total + torch.stack(of_eagle(head, row_of, samples, text, depth))
            seen += int(counts[text])
        return total[0] / total[2].clamp_min(1), (total[1] / total[2].clamp_min(1)).detach()

    return draw
