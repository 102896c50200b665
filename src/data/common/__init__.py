"""What data modules share: sampling, tokenizers, token caches, packing, the base of every text corpus."""
