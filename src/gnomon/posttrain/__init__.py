"""Post-training: fine-tuning, reinforcement learning at several efforts, distillation of several teachers into one student."""
