// Rows of a binary COPY as an Arrow record batch, in one pass over what libpq received.
//
// The connection is psycopg's, and so is libpq: its functions come in as pointers, which covers TLS and every other kind
// of connection. The batch leaves by the Arrow C data interface. `row_reader.py` is the only caller.

#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// What a column's values look like on the wire, and in Arrow. The numbers are those of `row_reader.py`.
enum kind { BOOLEAN, INT16, INT32, INT64, OID, DATE, TIMESTAMP, BYTES, JSONB, NUMERIC, UUID };

enum outcome { BATCH = 0, END = 1, SILENT = 2, BROKEN = 3, MALFORMED = 4, NO_MEMORY = 5 };

// The Arrow C data interface, as its specification gives it.
struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children, *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

struct libpq {
    int (*get_copy_data)(void *connection, char **row, int is_async);
    int (*consume_input)(void *connection);
    void (*free_memory)(void *);
};

struct column {
    enum kind kind;
    int32_t scale;      // of a decimal
    uint8_t *valid;     // bits
    uint8_t *values;    // fixed widths, or the bytes of all texts
    int32_t *offsets;   // of texts
    int64_t room;       // of `values`, where they are bytes of texts
    int64_t used;
    int64_t nulls;
    uint8_t *nan;       // bits of the decimals that are NaN; they are null in `values`
    int64_t nans;
};

struct reader {
    struct libpq libpq;
    void *connection;
    int32_t socket;
    int32_t columns;
    struct column *column;
    int64_t rows;
    int64_t room;       // in rows
    int64_t bytes;
    int32_t has_begun;  // the header of the format was read
    char *row;          // received, but not in a batch yet
    int32_t row_size;
};

static const int64_t UNIX_US = 946684800000000LL, UNIX_DAYS = 10957;
static const int64_t MAX_TEXT = INT32_MAX;

static uint16_t be16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static uint32_t be32(const uint8_t *p) { return (uint32_t)be16(p) << 16 | be16(p + 2); }
static uint64_t be64(const uint8_t *p) { return (uint64_t)be32(p) << 32 | be32(p + 4); }

static int is_text(enum kind kind) { return kind == BYTES || kind == JSONB || kind == UUID; }

static int64_t width(enum kind kind) {
    switch (kind) {
        case INT16: return 2;
        case INT32: case DATE: return 4;
        case INT64: case OID: case TIMESTAMP: return 8;
        case NUMERIC: return 16;
        default: return 0;
    }
}

static int64_t bits(int64_t rows) { return (rows + 7) / 8; }

// Resize what `at` points to, with zeros where it grew.
static int resize(void *at, int64_t before, int64_t after) {
    uint8_t **pointer = at, *made = realloc(*pointer, after ? (size_t)after : 1);
    if (!made) return 0;
    if (after > before) memset(made + before, 0, (size_t)(after - before));
    *pointer = made;
    return 1;
}

static int make_room(struct reader *reader, int64_t rows) {
    int64_t before = reader->room;
    for (int32_t c = 0; c < reader->columns; c++) {
        struct column *k = &reader->column[c];
        int64_t step = k->kind == BOOLEAN ? 0 : width(k->kind);
        if (!resize(&k->valid, bits(before), bits(rows))) return 0;
        if (k->kind == NUMERIC && !resize(&k->nan, bits(before), bits(rows))) return 0;
        if (k->kind == BOOLEAN && !resize(&k->values, bits(before), bits(rows))) return 0;
        if (step && !resize(&k->values, before * step, rows * step)) return 0;
        if (is_text(k->kind) && !resize(&k->offsets, before ? (before + 1) * 4 : 0, (rows + 1) * 4)) return 0;
    }
    reader->room = rows;
    return 1;
}

static uint8_t *text_room(struct column *k, int64_t size) {
    if (!k->values || k->used + size > k->room) {
        int64_t wanted = (k->used + size) * 2 + 4096;
        uint8_t *made = realloc(k->values, (size_t)wanted);
        if (!made) return NULL;
        k->values = made;
        k->room = wanted;
    }
    uint8_t *at = k->values + k->used;
    k->used += size;
    return at;
}

static __int128 power_of_ten(int exponent) {
    __int128 power = 1;
    while (exponent-- > 0) power *= 10;
    return power;
}

// A decimal of base 10,000 as an integer of the column's scale. 0 when it does not fit.
static int read_numeric(const uint8_t *p, int32_t size, int32_t scale, __int128 *value, int *is_nan) {
    if (size < 8) return 0;
    int digits = be16(p), weight = (int16_t)be16(p + 2), sign = be16(p + 4);
    *is_nan = sign == 0xC000;
    *value = 0;
    if (*is_nan) return 1;
    if ((sign != 0 && sign != 0x4000) || size != 8 + 2 * digits) return 0;
    static const int small[] = {1, 10, 100, 1000};
    __int128 sum = 0;
    int exponent = 0;
    for (int i = 0; i < digits; i++) {
        int digit = be16(p + 8 + 2 * i);
        exponent = 4 * (weight - i) + scale;
        if (digit > 9999) return 0;
        if (exponent >= 0) {
            if (sum > power_of_ten(38) / 10000) return 0;
            sum = sum * 10000 + digit;
        } else if (exponent > -4) {
            if (digit % small[-exponent]) return 0;
            sum = sum * small[4 + exponent] + digit / small[-exponent];
            exponent = 0;
        } else if (digit) {
            return 0;
        } else {
            exponent = 0;
        }
    }
    if (digits && exponent > 0) {
        if (exponent > 38 || (sum && sum > power_of_ten(38) / power_of_ten(exponent))) return 0;
        sum *= power_of_ten(exponent);
    }
    *value = sign == 0x4000 ? -sum : sum;
    return 1;
}

static void write_uuid(uint8_t *to, const uint8_t *from) {
    static const char hex[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) *to++ = '-';
        *to++ = (uint8_t)hex[from[i] >> 4];
        *to++ = (uint8_t)hex[from[i] & 15];
    }
}

static enum outcome read_value(struct column *k, int64_t r, const uint8_t *p, int32_t size) {
    switch (k->kind) {
        case BOOLEAN:
            if (size != 1) return MALFORMED;
            if (*p) k->values[r >> 3] |= (uint8_t)(1 << (r & 7));
            break;
        case INT16:
            if (size != 2) return MALFORMED;
            ((uint16_t *)k->values)[r] = be16(p);
            break;
        case INT32:
            if (size != 4) return MALFORMED;
            ((uint32_t *)k->values)[r] = be32(p);
            break;
        case INT64:
            if (size != 8) return MALFORMED;
            ((uint64_t *)k->values)[r] = be64(p);
            break;
        case OID:
            if (size != 4) return MALFORMED;
            ((uint64_t *)k->values)[r] = be32(p);
            break;
        // Infinities wrap around; `copy_query` finds them.
        case DATE:
            if (size != 4) return MALFORMED;
            ((uint32_t *)k->values)[r] = be32(p) + (uint32_t)UNIX_DAYS;
            break;
        case TIMESTAMP:
            if (size != 8) return MALFORMED;
            ((uint64_t *)k->values)[r] = be64(p) + (uint64_t)UNIX_US;
            break;
        case NUMERIC: {
            __int128 value;
            int is_nan;
            if (!read_numeric(p, size, k->scale, &value, &is_nan)) return MALFORMED;
            memcpy(k->values + 16 * r, &value, 16);
            if (is_nan) {
                k->nan[r >> 3] |= (uint8_t)(1 << (r & 7));
                k->nans++;
                k->nulls++;
                return BATCH;
            }
            break;
        }
        case JSONB:
            if (size < 1 || *p != 1) return MALFORMED;
            p++, size--;
            // fall through
        case BYTES: {
            uint8_t *to = text_room(k, size);
            if (!to) return NO_MEMORY;
            memcpy(to, p, (size_t)size);
            break;
        }
        case UUID: {
            uint8_t *to = text_room(k, 36);
            if (size != 16) return MALFORMED;
            if (!to) return NO_MEMORY;
            write_uuid(to, p);
            break;
        }
        default:
            return MALFORMED;
    }
    k->valid[r >> 3] |= (uint8_t)(1 << (r & 7));
    return BATCH;
}

static enum outcome read_row(struct reader *reader, const uint8_t *p, const uint8_t *end) {
    int64_t r = reader->rows;
    if (r == reader->room && !make_room(reader, r ? r * 2 : 1024)) return NO_MEMORY;
    p += 2;
    for (int32_t c = 0; c < reader->columns; c++) {
        struct column *k = &reader->column[c];
        if (end - p < 4) return MALFORMED;
        int32_t size = (int32_t)be32(p);
        p += 4;
        if (size >= 0) {
            if (end - p < size) return MALFORMED;
            enum outcome outcome = read_value(k, r, p, size);
            if (outcome != BATCH) return outcome;
            p += size;
        } else {
            k->nulls++;
        }
        if (is_text(k->kind)) k->offsets[r + 1] = (int32_t)k->used;
    }
    if (p != end) return MALFORMED;
    reader->rows++;
    reader->bytes += end - (const uint8_t *)reader->row;
    return BATCH;
}

// Whether the batch has no room for another row: offsets of texts have 31 bits.
static int is_full(const struct reader *reader, int64_t row_size) {
    for (int32_t c = 0; c < reader->columns; c++)
        if (reader->column[c].used + 2 * row_size + 64 > MAX_TEXT) return 1;
    return 0;
}

static void drop_row(struct reader *reader) {
    if (reader->row) reader->libpq.free_memory(reader->row);
    reader->row = NULL;
}

// Wait for a message, at most for this long.
static enum outcome receive(struct reader *reader, int milliseconds) {
    for (;;) {
        int size = reader->libpq.get_copy_data(reader->connection, &reader->row, 1);
        if (size > 0) {
            reader->row_size = size;
            return BATCH;
        }
        reader->row = NULL;
        if (size == -1) return END;
        if (size < -1) return BROKEN;
        struct pollfd socket = {.fd = reader->socket, .events = POLLIN};
        int ready = poll(&socket, 1, milliseconds);
        if (ready <= 0) return SILENT;  // or a signal, which Python looks at
        if (!reader->libpq.consume_input(reader->connection)) return BROKEN;
    }
}

static const char HEADER[] = "PGCOPY\n\377\r\n";

// Receive rows until a batch is full. SILENT: nothing arrived for `milliseconds`; call it again.
int row_reader_fill(struct reader *reader, int64_t max_rows, int64_t max_bytes, int32_t milliseconds) {
    while (reader->rows < max_rows && reader->bytes < max_bytes) {
        if (!reader->row) {
            enum outcome outcome = receive(reader, milliseconds);
            if (outcome != BATCH) return outcome;
        }
        const uint8_t *p = (const uint8_t *)reader->row, *end = p + reader->row_size;
        if (!reader->has_begun) {
            if (end - p < 19 || memcmp(p, HEADER, sizeof HEADER)) return MALFORMED;
            p += 19 + (int64_t)be32(p + 15);
            reader->has_begun = 1;
        }
        if (p < end) {
            if (end - p < 2) return MALFORMED;
            int fields = (int16_t)be16(p);
            if (fields != -1 && fields != reader->columns) return MALFORMED;
            if (fields != -1) {
                if (reader->rows && is_full(reader, end - p)) return BATCH;
                enum outcome outcome = read_row(reader, p, end);
                if (outcome != BATCH) return outcome;
            }
        }
        drop_row(reader);
    }
    return BATCH;
}

static void release_child(struct ArrowArray *array) {
    for (int64_t i = 0; i < array->n_buffers; i++) free((void *)array->buffers[i]);
    free(array->buffers);
    array->release = NULL;
}

static void release_batch(struct ArrowArray *array) {
    for (int64_t i = 0; i < array->n_children; i++) {
        if (array->children[i]->release) array->children[i]->release(array->children[i]);
        free(array->children[i]);
    }
    free(array->children);
    free(array->buffers);
    array->release = NULL;
}

static int move_column(struct reader *reader, struct column *k, struct ArrowArray *child) {
    int is_variable = is_text(k->kind);
    memset(child, 0, sizeof *child);
    child->buffers = calloc(3, sizeof(void *));
    if (!child->buffers) return 0;
    if (is_variable && !k->values && !text_room(k, 0)) return 0;
    child->length = reader->rows;
    child->null_count = k->nulls;
    child->n_buffers = is_variable ? 3 : 2;
    child->buffers[0] = k->valid;
    child->buffers[1] = is_variable ? (void *)k->offsets : (void *)k->values;
    if (is_variable) child->buffers[2] = k->values;
    child->release = release_child;
    free(k->nan);
    k->valid = k->values = k->nan = NULL;
    k->offsets = NULL;
    k->room = k->used = k->nulls = k->nans = 0;
    return 1;
}

// Move what was read into an Arrow struct, whose owner releases it. The reader is empty then.
int row_reader_take(struct reader *reader, struct ArrowArray *batch) {
    memset(batch, 0, sizeof *batch);
    batch->release = release_batch;
    batch->buffers = calloc(1, sizeof(void *));
    batch->children = calloc((size_t)reader->columns + 1, sizeof(void *));
    batch->n_buffers = 1;
    batch->length = reader->rows;
    int is_made = batch->buffers && batch->children && (reader->room || make_room(reader, 1));
    for (int32_t c = 0; is_made && c < reader->columns; c++) {
        struct ArrowArray *child = malloc(sizeof *child);
        is_made = child != NULL && move_column(reader, &reader->column[c], child);
        if (child && !is_made) free(child);
        if (is_made) batch->children[batch->n_children++] = child;
    }
    reader->rows = reader->room = reader->bytes = 0;
    if (!is_made) release_batch(batch);
    return is_made ? BATCH : NO_MEMORY;
}

struct reader *row_reader_new(struct libpq libpq, void *connection, int32_t socket, int32_t columns,
                              const int32_t *kinds, const int32_t *scales) {
    struct reader *reader = calloc(1, sizeof *reader);
    if (!reader) return NULL;
    reader->column = calloc((size_t)columns + 1, sizeof *reader->column);
    if (!reader->column) {
        free(reader);
        return NULL;
    }
    reader->libpq = libpq;
    reader->connection = connection;
    reader->socket = socket;
    reader->columns = columns;
    for (int32_t c = 0; c < columns; c++) {
        reader->column[c].kind = (enum kind)kinds[c];
        reader->column[c].scale = scales[c];
    }
    return reader;
}

int64_t row_reader_rows(const struct reader *reader) { return reader->rows; }

// How many decimals of a column are NaN, and their bits, which are valid until the batch is taken.
int64_t row_reader_nans(const struct reader *reader, int32_t column, const uint8_t **bits_of) {
    *bits_of = reader->column[column].nan;
    return reader->column[column].nans;
}

void row_reader_free(struct reader *reader) {
    drop_row(reader);
    for (int32_t c = 0; c < reader->columns; c++) {
        free(reader->column[c].valid);
        free(reader->column[c].values);
        free(reader->column[c].offsets);
        free(reader->column[c].nan);
    }
    free(reader->column);
    free(reader);
}
