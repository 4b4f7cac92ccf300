/* fuzz_text.c - hostile vocabularies, and any text through them.
 *
 * An input is the size of a text (u32), the text, and a section TEXT. Whatever the section says,
 * ids are below its n_ids, decoded text is UTF-8, and streamed text is the text of all ids.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "base/bytes.h"
#include "text/utf8.h"

#define MAX_IDS 65536U
#define MAX_TEXT_BYTES (1U << 20)

static void decode(const qsf_text *t, const uint32_t *ids, size_t n_ids, size_t room_bytes)
{
    static char whole[MAX_TEXT_BYTES];
    size_t n_whole = 0;
    const uint32_t flags = QSF_DETOKENIZE_START;
    require(qsf_detokenize(t, ids, n_ids, flags, whole, sizeof whole, &n_whole) == QSF_OK,
            "decode");
    if (n_whole > sizeof whole)
        return;
    require(qsf_utf8_valid_bytes((unsigned char *)whole, n_whole) == n_whole, "not UTF-8");
    char *const piece = malloc(room_bytes);
    require(piece != NULL, "memory");
    qsf_text_decoder d;
    qsf_decoder_init(t, flags, &d);
    size_t at = 0;
    for (size_t i = 0; i < n_ids; i++) {
        size_t n = 0;
        require(qsf_decoder_push(t, &d, ids[i], piece, room_bytes, &n) == QSF_OK, "push");
        require(at + n <= n_whole && memcmp(whole + at, piece, n) == 0, "streamed text differs");
        at += n;
    }
    at += qsf_decoder_flush(&d, piece);
    require(at == n_whole, "streamed text has another length");
    free(piece);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static uint32_t ids[MAX_IDS];
    if (n_bytes < 5)
        return -1;
    const size_t n_text = qsf_load_u32(data) % 4096;
    if (n_text + 4 >= n_bytes)
        return -1;
    qsf_text *t = NULL;
    if (qsf_text_create(data + 4 + n_text, n_bytes - 4 - n_text, &t) != QSF_OK)
        return 0;
    qsf_text_facts facts;
    qsf_text_info(t, &facts);
    for (uint32_t flags = 0; flags < 4; flags++) {
        size_t n_ids = 0;
        if (qsf_tokenize(t, (const char *)data + 4, n_text, flags, ids, MAX_IDS, &n_ids) != QSF_OK)
            continue;
        if (n_ids > MAX_IDS)
            n_ids = MAX_IDS;
        for (size_t i = 0; i < n_ids; i++)
            require(ids[i] < facts.n_ids, "an id that does not exist");
        decode(t, ids, n_ids, (size_t)facts.room_bytes);
    }
    (void)qsf_token_find(t, (const char *)data + 4, n_text, 0);
    qsf_text_close(t);
    return 0;
}
