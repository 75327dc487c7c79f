"""What plans of chains are compared with: the definition, every subset, and the plain recurrence."""

from itertools import combinations, pairwise


def peak_of(sizes, kept):
    """The peak of a subset, from the definition."""
    total, peak = 0, 0
    for i, j in pairwise(kept):
        total += sizes[i]
        peak = max(peak, total + sum(sizes[i + 1 : j]) + max(sizes[i:j]) + sizes[j])
    return max(peak, total + sizes[kept[-1]])


def best_of_all(sizes):
    """The least peak over every subset."""
    last = len(sizes) - 1
    inner = range(1, last)
    subsets = (chosen for count in range(len(inner) + 1) for chosen in combinations(inner, count))
    return min(peak_of(sizes, sorted({0, last, *chosen})) for chosen in subsets)


def quadratic(sizes):
    """The least peak by the recurrence as it stands, in O(n²)."""
    best = [0] * len(sizes)
    best[-1] = sizes[-1]
    for i in range(len(sizes) - 2, -1, -1):
        inside, top, least = 0, sizes[i], float("inf")
        for j in range(i + 1, len(sizes)):
            least = min(least, max(best[j], inside + top + sizes[j]))
            inside, top = inside + sizes[j], max(top, sizes[j])
        best[i] = sizes[i] + least
    return best[0]
