"""A whole post-training in miniature: three domains, three efforts, nine experts, one student."""
