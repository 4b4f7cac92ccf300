/* kv_tmpl.h - stores one position into a KV page, and rotates heads by a Hadamard matrix, over
 * lanes.
 *
 * Included by attend_tmpl.h. Contracts at qsf_kv_store_fn and qsf_hadamard_fn in kernels.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */

/* A quantised block of 64 values. */
typedef struct kv_block {
    uint16_t scale_f16;
    uint16_t min_f16;
    uint8_t codes[QSF_BLOCK];
} kv_block;

/* Returns the smallest half that is not below value >= 0; infinity if there is none. */
static inline uint16_t half_not_below(float value)
{
    const uint16_t nearest = qsf_half_from_float(value);
    return (uint16_t)(nearest + (qsf_half_to_float(nearest) < value));
}

static inline bool is_finite_half(uint16_t half)
{
    return (half & 0x7C00) != 0x7C00;
}

/* Finds the lowest and highest x and the largest |x| of x [64]. */
static inline void block_range(const float *x, float *lowest, float *highest, float *largest)
{
    lanes low = lanes_load(x);
    lanes high = low;
    lanes magnitude = lanes_abs(low);
    for (size_t i = QSF_LANES; i < QSF_BLOCK; i += QSF_LANES) {
        const lanes v = lanes_load(x + i);
        low = lanes_min(v, low);
        high = lanes_max(v, high);
        magnitude = lanes_larger_magnitude(magnitude, lanes_abs(v));
    }
    float by_lane[2][QSF_LANES];
    lanes_store(by_lane[0], low);
    lanes_store(by_lane[1], high);
    *lowest = by_lane[0][0];
    *highest = by_lane[1][0];
    *largest = lanes_top_magnitude(magnitude);
    for (size_t l = 1; l < QSF_LANES; l++) {
        *lowest = by_lane[0][l] < *lowest ? by_lane[0][l] : *lowest;
        *highest = by_lane[1][l] > *highest ? by_lane[1][l] : *highest;
    }
}

/* codes [64] = rint((x - min) / scale) in 0 .. top. Adding 1.5 * 2^23 rounds to the nearest even
 * integer, in the low bits of the sum. */
static inline void block_codes(const float *x, float min, float scale, float top, uint8_t *codes)
{
    for (size_t i = 0; i < QSF_BLOCK; i += QSF_LANES) {
        const lanes steps =
            lanes_div(lanes_sub(lanes_load(x + i), lanes_set(min)), lanes_set(scale));
        const lanes inside = lanes_min(lanes_max(steps, lanes_set(0.0F)), lanes_set(top));
        float rounded[QSF_LANES];
        lanes_store(rounded, lanes_add(inside, lanes_set(0x1.8p23F)));
        for (size_t l = 0; l < QSF_LANES; l++) {
            uint32_t bits;
            memcpy(&bits, &rounded[l], sizeof bits);
            codes[i + l] = (uint8_t)bits;
        }
    }
}

/* As block_codes, for signed values: 128 + rint(x / scale) in 1 .. 255. */
static inline void block_codes_8bit(const float *x, float scale, uint8_t *codes)
{
    for (size_t i = 0; i < QSF_BLOCK; i += QSF_LANES) {
        const lanes steps = lanes_div(lanes_load(x + i), lanes_set(scale));
        const lanes inside = lanes_min(lanes_max(steps, lanes_set(-127.0F)), lanes_set(127.0F));
        float rounded[QSF_LANES];
        /* Adding 128 after the rounding gives the same bits as adding 1.5 * 2^23 + 128 at once:
         * both are multiples of the sum's last place. */
        lanes_store(rounded, lanes_add(inside, lanes_set(0x1.8p23F + 128.0F)));
        for (size_t l = 0; l < QSF_LANES; l++) {
            uint32_t bits;
            memcpy(&bits, &rounded[l], sizeof bits);
            codes[i + l] = (uint8_t)bits;
        }
    }
}

/* Quantises x [n], n <= 64, to a block of 8, 4 or 2 bits. */
static inline void quantise_kv(qsf_dtype dtype, const float *x, size_t n, kv_block *out)
{
    float padded[QSF_BLOCK]; /* padded with a value of the block, which does not change the range */
    memcpy(padded, x, n * sizeof *x);
    for (size_t i = n; i < QSF_BLOCK; i++)
        padded[i] = x[0];
    float lowest;
    float highest;
    float largest;
    block_range(padded, &lowest, &highest, &largest);

    const float top = dtype == QSF_DTYPE_8BIT ? 255.0F : dtype == QSF_DTYPE_4BIT ? 15.0F : 3.0F;
    float step;
    out->min_f16 = 0;
    if (dtype == QSF_DTYPE_8BIT) {
        step = largest / 127.0F;
    } else {
        out->min_f16 = qsf_half_from_float(lowest);
        step = (highest - qsf_half_to_float(out->min_f16)) / top;
    }
    out->scale_f16 = half_not_below(step > 0.0F ? step : 0.0F);
    if (!(largest <= FLT_MAX) || !is_finite_half(out->min_f16) || !is_finite_half(out->scale_f16)) {
        *out = (kv_block){.scale_f16 = 0x7E00};
        return;
    }
    const float scale = qsf_half_to_float(out->scale_f16);
    if (scale == 0.0F)
        memset(out->codes, dtype == QSF_DTYPE_8BIT ? 128 : 0, QSF_BLOCK);
    else if (dtype == QSF_DTYPE_8BIT)
        block_codes_8bit(padded, scale, out->codes);
    else
        block_codes(padded, qsf_half_to_float(out->min_f16), scale, top, out->codes);
    memset(out->codes + n, 0, QSF_BLOCK - n);
}

/* Writes row r of a K tile. */
static inline void put_key(qsf_dtype dtype, const kv_block *from, size_t r, unsigned char *tile)
{
    const uint8_t *const c = from->codes;
    const bool has_min = dtype != QSF_DTYPE_8BIT;
    qsf_store_u16(tile + QSF_TILE_SCALES_OFF + 2 * r, from->scale_f16);
    if (has_min)
        qsf_store_u16(tile + QSF_TILE_MINS_OFF + 2 * r, from->min_f16);
    const size_t n_planes = dtype == QSF_DTYPE_8BIT ? 16 : dtype == QSF_DTYPE_4BIT ? 8 : 4;
    for (size_t p = 0; p < n_planes; p++) {
        unsigned char *const out = tile + QSF_TILE_CODES_OFF(has_min) + p * 64 + r * 4;
        for (size_t i = 4 * p; i < 4 * p + 4; i++) {
            if (dtype == QSF_DTYPE_8BIT)
                out[i % 4] = c[i];
            else if (dtype == QSF_DTYPE_4BIT)
                out[i % 4] = (uint8_t)(c[i] | c[i + 32] << 4);
            else
                out[i % 4] = (uint8_t)(c[i] | c[i + 16] << 2 | c[i + 32] << 4 | c[i + 48] << 6);
        }
    }
}

/* Writes slot `slot` of a block of a V page. */
static inline void put_value(qsf_dtype dtype, const kv_block *from, size_t slot,
                             unsigned char *block)
{
    const uint8_t *const c = from->codes;
    qsf_store_u16(block + 2 * slot, from->scale_f16);
    unsigned char *codes = block + 2 * (size_t)QSF_KV_PAGE_TOKENS;
    if (dtype != QSF_DTYPE_8BIT) {
        qsf_store_u16(codes + 2 * slot, from->min_f16);
        codes += 2 * (size_t)QSF_KV_PAGE_TOKENS;
    }
    if (dtype == QSF_DTYPE_8BIT)
        memcpy(codes + slot * 64, c, 64);
    else if (dtype == QSF_DTYPE_4BIT)
        for (size_t i = 0; i < 32; i++)
            codes[slot * 32 + i] = (uint8_t)(c[i] | c[i + 32] << 4);
    else
        for (size_t i = 0; i < 16; i++)
            codes[slot * 16 + i] =
                (uint8_t)(c[i] | c[i + 16] << 2 | c[i + 32] << 4 | c[i + 48] << 6);
}

/* Stores one position of quantised K or V. */
QSF_FORCED_INLINE void store_codes(qsf_dtype dtype, bool is_key, const float *x, size_t head_dim,
                                   size_t slot, unsigned char *page)
{
    const size_t n_blocks = (head_dim + QSF_BLOCK - 1) / QSF_BLOCK;
    const size_t tile_bytes = qsf_dtype_tile_bytes(dtype);
    for (size_t b = 0; b < n_blocks; b++) {
        const size_t left = head_dim - b * QSF_BLOCK;
        kv_block block;
        quantise_kv(dtype, x + b * QSF_BLOCK, left < QSF_BLOCK ? left : QSF_BLOCK, &block);
        if (is_key)
            put_key(dtype, &block, slot % QSF_TILE_ROWS,
                    page + (slot / QSF_TILE_ROWS * n_blocks + b) * tile_bytes);
        else
            put_value(dtype, &block, slot, page + 2 * b * tile_bytes);
    }
}

/* Stores one position of f16 or f32 K or V; neighbouring values of a block are `stride` values
 * apart. */
QSF_FORCED_INLINE void store_values(bool is_f16, bool is_key, const float *x, size_t head_dim,
                                    size_t slot, unsigned char *page)
{
    const size_t n_cols = (head_dim + QSF_BLOCK - 1) / QSF_BLOCK * QSF_BLOCK;
    for (size_t d = 0; d < n_cols; d += QSF_LANES) {
        const size_t left = d < head_dim ? head_dim - d : 0;
        const lanes v = lanes_load_part(x + d, left < QSF_LANES ? left : QSF_LANES);
        unsigned char values[QSF_LANES * sizeof(float)];
        const size_t bytes = is_f16 ? 2 : 4;
        float floats[QSF_LANES];
        lanes_store(floats, v);
        if (is_f16)
            lanes_store_f16(values, v);
        else
            memcpy(values, floats, sizeof floats);
        if (is_key) { /* tiles [2, n_blocks] of columns [64, 16] */
            const size_t tile_row = slot / QSF_TILE_ROWS;
            unsigned char *const out =
                page + ((tile_row * n_cols + d) * QSF_TILE_ROWS + slot % QSF_TILE_ROWS) * bytes;
            for (size_t i = 0; i < QSF_LANES; i++)
                memcpy(out + i * QSF_TILE_ROWS * bytes, values + i * bytes, bytes);
        } else { /* blocks of [32, 64] */
            const size_t block = d / QSF_BLOCK * QSF_BLOCK * QSF_KV_PAGE_TOKENS;
            memcpy(page + (block + slot * QSF_BLOCK + d % QSF_BLOCK) * bytes, values,
                   QSF_LANES * bytes);
        }
    }
}

/* The two store functions of a type; store(how, is_key, ...) is one of the above. */
#define KV_STORE(type, store, how)                                                                 \
    static void QSF_NAME(k_store_##type)(const float *x, size_t head_dim, size_t slot, void *page) \
    {                                                                                              \
        store(how, true, x, head_dim, slot, page);                                                 \
    }                                                                                              \
    static void QSF_NAME(v_store_##type)(const float *x, size_t head_dim, size_t slot, void *page) \
    {                                                                                              \
        store(how, false, x, head_dim, slot, page);                                                \
    }

KV_STORE(f32, store_values, false)
KV_STORE(f16, store_values, true)
KV_STORE(8bit, store_codes, QSF_DTYPE_8BIT)
KV_STORE(4bit, store_codes, QSF_DTYPE_4BIT)
KV_STORE(2bit, store_codes, QSF_DTYPE_2BIT)

/* A block of n values, a literal up to 128: all of it is in registers. */
QSF_FORCED_INLINE void hadamard_registers(float *x, size_t n)
{
    lanes v[128 / QSF_LANES];
    const size_t n_lanes = n / QSF_LANES;
    for (size_t i = 0; i < n_lanes; i++) {
        v[i] = lanes_load(x + i * QSF_LANES);
        for (size_t h = 1; h < QSF_LANES; h *= 2)
            v[i] = lanes_butterfly(v[i], h);
    }
    for (size_t h = 1; h < n_lanes; h *= 2)
        for (size_t i = 0; i < n_lanes; i++) {
            if ((i & h) != 0)
                continue;
            const lanes a = v[i];
            v[i] = lanes_add(a, v[i + h]);
            v[i + h] = lanes_sub(a, v[i + h]);
        }
    const lanes factor = lanes_set(1.0F / sqrtf((float)n));
    for (size_t i = 0; i < n_lanes; i++)
        lanes_store(x + i * QSF_LANES, lanes_mul(v[i], factor));
}

/* A block of n values: a power of two from 16 on. */
QSF_FORCED_INLINE void hadamard_block(float *x, size_t n)
{
    for (size_t i = 0; i < n; i += QSF_LANES) {
        lanes v = lanes_load(x + i);
        v = lanes_butterfly(v, 1);
        v = lanes_butterfly(v, 2);
        v = lanes_butterfly(v, 4);
        lanes_store(x + i, lanes_butterfly(v, 8));
    }
    for (size_t h = QSF_LANES; h < n; h *= 2)
        for (size_t begin = 0; begin < n; begin += 2 * h)
            for (size_t i = begin; i < begin + h; i += QSF_LANES) {
                const lanes a = lanes_load(x + i);
                const lanes b = lanes_load(x + i + h);
                lanes_store(x + i, lanes_add(a, b));
                lanes_store(x + i + h, lanes_sub(a, b));
            }
    const lanes factor = lanes_set(1.0F / sqrtf((float)n));
    for (size_t i = 0; i < n; i += QSF_LANES)
        lanes_store(x + i, lanes_mul(lanes_load(x + i), factor));
}

static void QSF_NAME(hadamard)(float *x, size_t n)
{
    for (size_t m = 4096; m >= QSF_LANES; m /= 2)
        if ((n & m) != 0) {
            if (m == 64)
                hadamard_registers(x, 64);
            else if (m == 128)
                hadamard_registers(x, 128);
            else
                hadamard_block(x, m);
            x += m;
        }
}
