"""Task 5, solved."""


def propose(weights, top_k, draw):
    least = sorted(weights)[-top_k]
    cut = [w if w >= least else 0 for w in weights]
    q = [w / sum(cut) for w in cut]
    return draw(q), q


def judge(draft, p, q, chance, draw):
    for i, token in enumerate(draft):
        if not chance(min(1, p[i][token] / q[i][token])):
            return [*draft[:i], draw([max(0, a - b) for a, b in zip(p[i], q[i])])]
    return [*draft, draw(p[len(draft)])]
