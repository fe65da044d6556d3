"""outpace: Hugging Face causal language models, decoded faster, with exactly the text they would have written."""
