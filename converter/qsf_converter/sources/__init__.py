"""The checkpoints that can be read: HuggingFace folders, PyTorch archives, GGUF files."""
# SPDX-License-Identifier: Apache-2.0
