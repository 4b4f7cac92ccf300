"""Text: tokens, chat templates, sampling."""
# SPDX-License-Identifier: Apache-2.0
