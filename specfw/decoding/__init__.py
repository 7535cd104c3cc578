"""The pure logic of speculative decoding: drafts, chance, laws, verifiers, stopping. No transformers."""
