/* scan.c - one function for each expression, made from shared parts. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/scan.h"

#include "text/unicode.h"
#include "text/utf8.h"

typedef const unsigned char *at;

/* Kind of the character at p, 0 at the end; *next is after it. */
static inline unsigned look(at p, at end, at *next)
{
    *next = p;
    if (p == end)
        return 0;
    size_t n_bytes;
    const uint32_t c = qsf_utf8_load(p, &n_bytes);
    *next = p + n_bytes;
    return qsf_unicode_kind(c);
}

static inline bool is_line_end(at p, at end)
{
    return p != end && (*p == '\r' || *p == '\n');
}

/* Returns the place after the characters from p on that are of one of these kinds. */
static inline at skip(at p, at end, unsigned kinds)
{
    at next;
    while ((look(p, end, &next) & kinds) != 0)
        p = next;
    return p;
}

/* Returns the place after the characters from p on that are of none of these kinds. */
static inline at skip_others(at p, at end, unsigned kinds)
{
    at next;
    while (p != end && (look(p, end, &next) & kinds) == 0)
        p = next;
    return p;
}

/* The same, for at most `most` characters. */
static at skip_most(at p, at end, unsigned kinds, int most)
{
    at next;
    for (int i = 0; i < most && (look(p, end, &next) & kinds) != 0; i++)
        p = next;
    return p;
}

static at or_null(at stop, at begin)
{
    return stop == begin ? NULL : stop;
}

/* 's|'t|'re|'ve|'m|'ll|'d */
static at contraction(at p, at end)
{
    if (end - p < 2 || p[0] != '\'')
        return NULL;
    const unsigned char a = p[1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return p + 2;
    if (end - p >= 3 && ((p[2] == 'e' && (a == 'r' || a == 'v')) || (p[2] == 'l' && a == 'l')))
        return p + 3;
    return NULL;
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d); U+017F is an s there. */
static at any_contraction(at p, at end)
{
    if (end - p < 2 || p[0] != '\'')
        return NULL;
    if (end - p >= 3 && p[1] == 0xC5 && p[2] == 0xBF)
        return p + 3;
    const unsigned char lower[3] = {'\'', (unsigned char)(p[1] < 0x80 ? p[1] | 0x20 : 0),
                                    (unsigned char)(end - p >= 3 && p[2] < 0x80 ? p[2] | 0x20 : 0)};
    const at stop = contraction(lower, lower + (end - p >= 3 ? 3 : 2));
    return stop == NULL ? NULL : p + (stop - lower);
}

/* [^\r\n\p{L}\p{N}]?[letters]+ with `not_first` for the kinds that may not come first. */
static at word(at p, at end, unsigned letters, unsigned not_first)
{
    at next;
    const unsigned kind = look(p, end, &next);
    if ((kind & not_first) == 0 && !is_line_end(p, end)) {
        const at stop = skip(next, end, letters);
        if (stop != next)
            return stop;
    }
    return or_null(skip(p, end, letters), p);
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ ; the first alternative only if has_lines, the last only if has_last. */
static at spaces(at p, at end, bool has_lines, bool has_last)
{
    at line_end = NULL; /* after the last line break */
    at last = p;        /* the last space */
    at q = p;
    at next;
    while ((look(q, end, &next) & QSF_CHAR_SPACE) != 0) {
        if (is_line_end(q, end))
            line_end = next;
        last = q;
        q = next;
    }
    if (q == p)
        return NULL;
    if (has_lines && line_end != NULL)
        return line_end;
    if (q == end)
        return q;
    if (last != p)
        return last;
    return has_last ? q : NULL;
}

/* A space, or nothing, and then a run of the kinds (or of all others). */
static at after_space(at p, at end, unsigned kinds, bool is_others)
{
    const at begin = *p == ' ' ? p + 1 : p;
    const at stop = is_others ? skip_others(begin, end, kinds) : skip(begin, end, kinds);
    return stop != begin ? stop : NULL;
}

/* ` ?[^\s\p{L}\p{N}]+` and then any of \r, \n and, where has_slash, / */
static at symbols(at p, at end, unsigned kinds, bool is_others, bool has_slash)
{
    at stop = after_space(p, end, kinds, is_others);
    while (stop != NULL && (is_line_end(stop, end) || (has_slash && stop != end && *stop == '/')))
        stop++;
    return stop;
}

/* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static at scan_gpt2_tail(at p, at end, bool has_last)
{
    at stop = contraction(p, end);
    if (stop == NULL)
        stop = after_space(p, end, QSF_CHAR_LETTER, false);
    if (stop == NULL)
        stop = after_space(p, end, QSF_CHAR_NUMBER, false);
    if (stop == NULL)
        stop = after_space(p, end, QSF_CHAR_SPACE | QSF_CHAR_LETTER | QSF_CHAR_NUMBER, true);
    return stop != NULL ? stop : spaces(p, end, false, has_last);
}

static at scan_gpt2(at p, at end)
{
    return scan_gpt2_tail(p, end, true);
}

/* The same without the last alternative. */
static at scan_llama_cpp(at p, at end)
{
    return scan_gpt2_tail(p, end, false);
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?L+|\p{N}{1,3}| ?[^\s L \p{N}]+[\r\n]*|
 * \s*[\r\n]+|\s+(?!\S)|\s+ ; L is \p{L} or [\p{L}\p{M}], and so many numbers */
static inline at scan_like_cl100k(at p, at end, unsigned letters, int n_numbers)
{
    at stop = any_contraction(p, end);
    if (stop == NULL)
        stop = word(p, end, letters, QSF_CHAR_LETTER | QSF_CHAR_NUMBER);
    if (stop == NULL)
        stop = or_null(skip_most(p, end, QSF_CHAR_NUMBER, n_numbers), p);
    if (stop == NULL)
        stop = symbols(p, end, QSF_CHAR_SPACE | letters | QSF_CHAR_NUMBER, true, false);
    return stop != NULL ? stop : spaces(p, end, true, true);
}

static at scan_cl100k(at p, at end)
{
    return scan_like_cl100k(p, end, QSF_CHAR_LETTER, 3);
}

static at scan_qwen2(at p, at end)
{
    return scan_like_cl100k(p, end, QSF_CHAR_LETTER, 1);
}

static at scan_qwen35(at p, at end)
{
    return scan_like_cl100k(p, end, QSF_CHAR_LETTER | QSF_CHAR_MARK, 1);
}

/* \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}, and the same with \p{Ll} for the first two. */
#define UPPERS (QSF_CHAR_UPPER | QSF_CHAR_OTHER | QSF_CHAR_MARK)
#define LOWERS (QSF_CHAR_LOWER | QSF_CHAR_OTHER | QSF_CHAR_MARK)

/* [UPPERS]*[LOWERS]+ : without a following lower letter it ends with the last character that is
 * both. */
static at any_then_lower(at p, at end)
{
    at last_both = NULL; /* after it */
    at next;
    for (unsigned kind; ((kind = look(p, end, &next)) & UPPERS) != 0; p = next)
        if ((kind & LOWERS) != 0)
            last_both = next;
    const at stop = skip(p, end, LOWERS);
    return stop != p ? stop : last_both;
}

/* [UPPERS]+[LOWERS]* */
static at upper_then_any(at p, at end)
{
    const at stop = skip(p, end, UPPERS);
    return stop == p ? NULL : skip(stop, end, LOWERS);
}

/* [^\r\n\p{L}\p{N}]? and then one of the two above; without the optional part if necessary. */
static at cased_word(at p, at end, qsf_scanner *rest)
{
    at next;
    const unsigned kind = look(p, end, &next);
    if ((kind & (QSF_CHAR_LETTER | QSF_CHAR_NUMBER)) == 0 && !is_line_end(p, end)) {
        const at stop = rest(next, end);
        if (stop != NULL)
            return stop;
    }
    return rest(p, end);
}

/* [^\r\n\p{L}\p{N}]?[UPPERS]*[LOWERS]+C?|[^\r\n\p{L}\p{N}]?[UPPERS]+[LOWERS]*C?|\p{N}{1,3}|
 *  ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+ ; C is (?i:'s|'t|'re|'ve|'m|'ll|'d) */
static inline at scan_like_o200k(at p, at end, bool has_contractions, int n_numbers)
{
    at stop = cased_word(p, end, any_then_lower);
    if (stop == NULL)
        stop = cased_word(p, end, upper_then_any);
    if (stop != NULL) {
        const at longer = has_contractions ? any_contraction(stop, end) : NULL;
        return longer != NULL ? longer : stop;
    }
    stop = or_null(skip_most(p, end, QSF_CHAR_NUMBER, n_numbers), p);
    if (stop == NULL)
        stop = symbols(p, end, QSF_CHAR_SPACE | QSF_CHAR_LETTER | QSF_CHAR_NUMBER, true, true);
    return stop != NULL ? stop : spaces(p, end, true, true);
}

static at scan_o200k(at p, at end)
{
    return scan_like_o200k(p, end, true, 3);
}

/* The same without C, and with single numbers. */
static at scan_tekken(at p, at end)
{
    return scan_like_o200k(p, end, false, 1);
}

static bool is_ascii_letter(at p, at end)
{
    return p != end && ((*p | 0x20) >= 'a') && ((*p | 0x20) <= 'z');
}

static bool is_ascii_punct(unsigned char c)
{
    return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
           (c >= '{' && c <= '~');
}

/* [ASCII punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|
 * \s*[\r\n]+|\s+(?!\S)|\s+ */
static at scan_deepseek3(at p, at end)
{
    if (is_ascii_punct(*p) && is_ascii_letter(p + 1, end)) {
        for (p++; is_ascii_letter(p, end);)
            p++;
        return p;
    }
    at stop = word(p, end, QSF_CHAR_LETTER | QSF_CHAR_MARK,
                   QSF_CHAR_LETTER | QSF_CHAR_PUNCT | QSF_CHAR_SYMBOL);
    if (stop == NULL)
        stop = symbols(p, end, QSF_CHAR_PUNCT | QSF_CHAR_SYMBOL, false, false);
    return stop != NULL ? stop : spaces(p, end, true, true);
}

/* \p{N}{1,3} */
static at scan_numbers_3(at p, at end)
{
    return or_null(skip_most(p, end, QSF_CHAR_NUMBER, 3), p);
}

/* \p{N} */
static at scan_number(at p, at end)
{
    return or_null(skip_most(p, end, QSF_CHAR_NUMBER, 1), p);
}

/* \p{N}+ */
static at scan_numbers(at p, at end)
{
    return or_null(skip(p, end, QSF_CHAR_NUMBER), p);
}

/* [0-9][0-9][0-9] */
static at scan_ascii_3(at p, at end)
{
    for (int i = 0; i < 3; i++)
        if (end - p <= i || p[i] < '0' || p[i] > '9')
            return NULL;
    return p + 3;
}

/* U+4E00 to U+9FA5, and U+3040 to U+30FF: [\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+ */
static at scan_cjk(at p, at end)
{
    const at begin = p;
    while (p != end) {
        size_t n_bytes;
        const uint32_t c = qsf_utf8_load(p, &n_bytes);
        if (!((c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF)))
            break;
        p += n_bytes;
    }
    return or_null(p, begin);
}

/* [\p{P}\$\+<=>\^~\|]+ */
static at scan_punct_falcon(at p, at end)
{
    const at begin = p;
    at next;
    while (p != end && ((look(p, end, &next) & QSF_CHAR_PUNCT) != 0 ||
                        (*p < 0x80 && is_ascii_punct(*p) && *p != '`'))) {
        p = next;
    }
    return or_null(p, begin);
}

static at digits(at p, at end, bool is_single)
{
    const at begin = p;
    while (p != end) {
        size_t n_bytes;
        if ((qsf_unicode_word(qsf_utf8_load(p, &n_bytes)) & QSF_CHAR_NUMERIC) == 0)
            break;
        p += n_bytes;
        if (is_single)
            break;
    }
    return or_null(p, begin);
}

/* Characters that are numeric to Rust's char::is_numeric */
static at scan_digits(at p, at end)
{
    return digits(p, end, false);
}

static at scan_digit(at p, at end)
{
    return digits(p, end, true);
}

/* [\r\n] */
static at scan_line_end(at p, at end)
{
    return is_line_end(p, end) ? p + 1 : NULL;
}

typedef struct char_range {
    uint32_t first;
    uint32_t last;
} char_range;

/* Returns the place after the characters from p on that are in ascending ranges. */
static at skip_ranges(at p, at end, const char_range *ranges, size_t n)
{
    while (p != end) {
        size_t n_bytes;
        const uint32_t c = qsf_utf8_load(p, &n_bytes);
        size_t low = 0;
        for (size_t high = n; low < high;) {
            const size_t i = low + (high - low) / 2;
            if (ranges[i].last < c)
                low = i + 1;
            else
                high = i;
        }
        if (low == n || c < ranges[low].first)
            break;
        p += n_bytes;
    }
    return p;
}

/* Returns the place after a space, if one is there. */
static at skip_space(at p, at end)
{
    return skip_most(p, end, QSF_CHAR_SPACE, 1);
}

/* \s?[letters with cases]+, which DeepSeek V2 lists */
static at scan_cased(at p, at end)
{
    static const char_range cased[] = {
        {0x41, 0x5A},       {0x61, 0x7A},       {0xB5, 0xB5},       {0xC0, 0xD6},
        {0xD8, 0xF6},       {0xF8, 0x1BA},      {0x1BC, 0x1BF},     {0x1C4, 0x293},
        {0x295, 0x2AF},     {0x370, 0x373},     {0x376, 0x376},     {0x377, 0x377},
        {0x37B, 0x37D},     {0x37F, 0x37F},     {0x386, 0x386},     {0x388, 0x38A},
        {0x38C, 0x38C},     {0x38E, 0x3A1},     {0x3A3, 0x3F5},     {0x3F7, 0x481},
        {0x48A, 0x52F},     {0x531, 0x556},     {0x10A0, 0x10C5},   {0x13A0, 0x13F5},
        {0x13F8, 0x13FD},   {0x1C90, 0x1CBA},   {0x1CBD, 0x1CBF},   {0x1D00, 0x1D2B},
        {0x1D6B, 0x1D77},   {0x1D79, 0x1D9A},   {0x1E00, 0x1F15},   {0x1F18, 0x1F1D},
        {0x1F20, 0x1F45},   {0x1F48, 0x1F4D},   {0x1F50, 0x1F57},   {0x1F59, 0x1F59},
        {0x1F5B, 0x1F5B},   {0x1F5D, 0x1F5D},   {0x1F5F, 0x1F7D},   {0x1F80, 0x1FB4},
        {0x1FB6, 0x1FBC},   {0x1FBE, 0x1FBE},   {0x1FC2, 0x1FC4},   {0x1FC6, 0x1FCC},
        {0x1FD0, 0x1FD3},   {0x1FD6, 0x1FDB},   {0x1FE0, 0x1FEC},   {0x1FF2, 0x1FF4},
        {0x1FF6, 0x1FFC},   {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210A, 0x2113},
        {0x2115, 0x2115},   {0x2119, 0x211D},   {0x2124, 0x2124},   {0x2126, 0x2126},
        {0x2128, 0x2128},   {0x212A, 0x212D},   {0x212F, 0x2134},   {0x2139, 0x2139},
        {0x213C, 0x213F},   {0x2145, 0x2149},   {0x214E, 0x214E},   {0x2183, 0x2183},
        {0x2184, 0x2184},   {0x2C00, 0x2C7B},   {0x2C7E, 0x2CE4},   {0x2CEB, 0x2CEE},
        {0x2CF2, 0x2CF2},   {0x2CF3, 0x2CF3},   {0xA640, 0xA66D},   {0xA680, 0xA69B},
        {0xA722, 0xA76F},   {0xA771, 0xA787},   {0xA78B, 0xA78E},   {0xAB70, 0xABBF},
        {0xFB00, 0xFB06},   {0xFB13, 0xFB17},   {0xFF21, 0xFF3A},   {0xFF41, 0xFF5A},
        {0x10400, 0x1044F}, {0x104B0, 0x104D3}, {0x104D8, 0x104FB}, {0x10C80, 0x10CB2},
        {0x10CC0, 0x10CF2}, {0x118A0, 0x118DF}, {0x1E900, 0x1E943},
    };
    const at begin = skip_space(p, end);
    return or_null(skip_ranges(begin, end, cased, sizeof cased / sizeof cased[0]), begin);
}

/* \s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+; U+3000 is a space too */
static at scan_signs(at p, at end)
{
    static const char_range signs[] = {{0x21, 0x2F},     {0x3A, 0x7E},     {0x2018, 0x201F},
                                       {0x3000, 0x3002}, {0xFF01, 0xFF0F}, {0xFF1A, 0xFF5E}};
    const size_t n = sizeof signs / sizeof signs[0];
    const at begin = skip_space(p, end);
    const at stop = or_null(skip_ranges(begin, end, signs, n), begin);
    return stop != NULL ? stop : or_null(skip_ranges(p, end, signs, n), p);
}

/* \s+$ */
static at scan_last_spaces(at p, at end)
{
    return p != end && skip(p, end, QSF_CHAR_SPACE) == end ? end : NULL;
}

/* [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+ */
static at scan_ideographs(at p, at end)
{
    static const char_range ideographs[] = {{0x800, 0x9FA5}, {0xAC00, 0xD7FF}};
    return or_null(skip_ranges(p, end, ideographs, 2), p);
}

/* \s?\p{L}+ */
static at scan_letters(at p, at end)
{
    const at begin = skip_space(p, end);
    return or_null(skip(begin, end, QSF_CHAR_LETTER), begin);
}

/* \s?\p{P}+ */
static at scan_puncts(at p, at end)
{
    const at begin = skip_space(p, end);
    return or_null(skip(begin, end, QSF_CHAR_PUNCT), begin);
}

static at scan_spaces(at p, at end)
{
    return or_null(skip(p, end, QSF_CHAR_SPACE), p);
}

/* Spaces, or one punctuation mark, or one ideograph as BERT lists them */
static at scan_bert(at p, at end)
{
    static const char_range ideographs[] = {
        {0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},  {0x20000, 0x2A6DF},
        {0x2A700, 0x2B81F}, {0x2B820, 0x2CEAF}, {0x2F800, 0x2FA1F}};
    at next;
    const bool is_mark =
        (look(p, end, &next) & QSF_CHAR_PUNCT) != 0 || (*p < 0x80 && is_ascii_punct(*p));
    if (is_mark || skip_ranges(p, next, ideographs, 7) == next)
        return next;
    return scan_spaces(p, end);
}

qsf_scanner *qsf_scanner_of(qsf_step_kind kind)
{
    static qsf_scanner *const scanners[QSF_STEP_COUNT] = {
        [QSF_STEP_DIGITS] = scan_digits,
        [QSF_STEP_DIGIT] = scan_digit,
        [QSF_STEP_GPT2] = scan_gpt2,
        [QSF_STEP_CL100K] = scan_cl100k,
        [QSF_STEP_QWEN2] = scan_qwen2,
        [QSF_STEP_QWEN35] = scan_qwen35,
        [QSF_STEP_O200K] = scan_o200k,
        [QSF_STEP_NUMBERS_3] = scan_numbers_3,
        [QSF_STEP_CJK] = scan_cjk,
        [QSF_STEP_DEEPSEEK3] = scan_deepseek3,
        [QSF_STEP_NUMBER] = scan_number,
        [QSF_STEP_ASCII_3] = scan_ascii_3,
        [QSF_STEP_LLAMA_CPP] = scan_llama_cpp,
        [QSF_STEP_PUNCT_FALCON] = scan_punct_falcon,
        [QSF_STEP_NUMBERS] = scan_numbers,
        [QSF_STEP_TEKKEN] = scan_tekken,
        [QSF_STEP_LINE_END] = scan_line_end,
        [QSF_STEP_CASED] = scan_cased,
        [QSF_STEP_SIGNS] = scan_signs,
        [QSF_STEP_LAST_SPACES] = scan_last_spaces,
        [QSF_STEP_IDEOGRAPHS] = scan_ideographs,
        [QSF_STEP_LETTERS] = scan_letters,
        [QSF_STEP_PUNCTS] = scan_puncts,
        [QSF_STEP_BERT] = scan_bert,
        [QSF_STEP_SPACES] = scan_spaces,
    };
    return (unsigned)kind < QSF_STEP_COUNT ? scanners[kind] : NULL;
}
