"""Head sizes that the operators accept, derived from any width that is a multiple of 16."""

from src.errors import UserError

MAX_KEY_DIM = 256
MAX_VALUE_DIM = 512


def split_heads(
    width: int, n_heads: int | None, head_dim: int | None, *, prefer: int, limit: int = MAX_KEY_DIM
) -> tuple[int, int]:
    """`(n_heads, head_dim)` with `head_dim` a multiple of 16 up to `limit`.

    What is given is kept, and what is missing makes `n_heads · head_dim = width`; with neither given,
    `head_dim` is the largest divisor of `width` up to `prefer`. UserError for a request without an answer.
    """
    if n_heads is not None and n_heads < 1:
        raise UserError(f"mixer.n_heads={n_heads}: must be at least 1")
    if head_dim is not None:
        check_dim("mixer.head_dim", head_dim, limit)
    if head_dim is None and n_heads is None:
        head_dim = max(d for d in range(16, max(16, prefer) + 1, 16) if width % d == 0)
    elif head_dim is None:
        head_dim, rest = divmod(width, n_heads)
        if rest or head_dim % 16 or not 16 <= head_dim <= limit:
            allowed = [n for n in range(1, width // 16 + 1) if width % (16 * n) == 0 and width // n <= limit]
            raise UserError(
                f"mixer.n_heads={n_heads}: does not split a width of {width} into heads of a multiple "
                f"of 16 up to {limit}; allowed: {', '.join(map(str, allowed))} (or give mixer.head_dim too)"
            )
    if n_heads is None:
        n_heads, rest = divmod(width, head_dim)
        if rest:
            raise UserError(f"mixer.head_dim={head_dim}: does not divide a width of {width} (give mixer.n_heads too)")
    return n_heads, head_dim


def check_dim(key: str, value: int, limit: int) -> None:
    """UserError unless the operators accept a head of this width."""
    if value % 16 or not 16 <= value <= limit:
        raise UserError(f"{key}={value}: must be a multiple of 16 from 16 to {limit}")


def check_divides(key: str, value: int, whole_name: str, whole: int) -> None:
    """UserError unless `value` divides `whole`."""
    if value < 1 or whole % value:
        raise UserError(f"{key}={value}: must divide {whole_name}, which is {whole}")
