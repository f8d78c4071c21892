"""Images: canonical pixels, and what a vision-language model makes of them."""
