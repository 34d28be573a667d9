// The kernels that all other files use: a small matrix product that keeps its result in registers, inner products
// of rows, and a transposition. Eigen's packets give them the widest registers that the compiler may use for this module.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <cstring>

namespace fasth {

using Index = std::ptrdiff_t;

template <class T> using Packet = typename Eigen::internal::packet_traits<T>::type;
template <class T> constexpr Index packet_size = Eigen::internal::unpacket_traits<Packet<T>>::size;

constexpr Index padding = 16; // the columns of small matrices are rounded up to a multiple of this

constexpr Index round_up(Index n, Index multiple) { return (n + multiple - 1) / multiple * multiple; }

// Forces inlining of functions whose arguments are in registers, which would otherwise go through memory. Builds with
// sanitizers do not, since they would take five minutes.
#if defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define FASTH_INLINE inline __attribute__((always_inline))
#else
#define FASTH_INLINE inline
#endif
#if defined(__GNUC__)
#define FASTH_NEVER_INLINE __attribute__((noinline))
#else
#define FASTH_NEVER_INLINE
#endif

// Number of rows of a tile with `columns` packets that fits into the registers, with room for the operands. Wide tiles load
// less for the same work, if the result is wide enough.
constexpr int usual_tile = 2;
#if defined(EIGEN_VECTORIZE_AVX512) || defined(__aarch64__)
constexpr int widest_tile = 4;
constexpr int tile_rows(int columns) { return columns == 4 ? 6 : columns == 2 ? 12 : 16; }
#else
constexpr int widest_tile = 2;
constexpr int tile_rows(int columns) { return columns == 2 ? 6 : 12; }
#endif

enum class Result { set, add, subtract, negative, negative_streamed };

template <class T> struct Matrix { // row-major, rows row_stride apart
    T *data;
    Index row_stride;
};

// The part of an operand that is not zero. Entries outside of it that a tile reads are zero in memory too.
enum class Shape { dense, lower_left, upper_left, strictly_lower_right, strictly_upper_right };

// left · right over `inner`. The left operand is read one number at a time, so it may have any strides.
template <class T> struct Term {
    Index inner;
    const T *left;
    Index row_stride, column_stride;
    Matrix<const T> right;
    Shape shape = Shape::dense;
};

// Stores past the caches, which avoids reading overwritten lines: for results too large to stay in the caches. The
// address must be a multiple of the packet's size, and a fence must follow before another thread reads.
template <class T> inline void stream(T *to, const Packet<T> &value) {
#if defined(EIGEN_VECTORIZE_AVX512)
    if constexpr (sizeof(T) == 4)
        _mm512_stream_ps(to, value);
    else
        _mm512_stream_pd(to, value);
#elif defined(EIGEN_VECTORIZE_AVX)
    if constexpr (sizeof(T) == 4)
        _mm256_stream_ps(to, value);
    else
        _mm256_stream_pd(to, value);
#else
    Eigen::internal::pstoreu(to, value);
#endif
}
inline void fence() {
#if defined(EIGEN_VECTORIZE_AVX)
    _mm_sfence();
#endif
}

template <class T, int rows, int columns> using Accumulators = Packet<T>[rows][columns];

// sum += left · right over from ≤ l < to, for packets `first` to `last` of the columns. Every third row has a pointer of its
// own: an address can have one or two strides added to it for free, but no more.
template <int first, int last, class T, int rows, int columns>
FASTH_INLINE void accumulate(const Term<T> &term, Index row, Index column, Index from, Index to,
                             Accumulators<T, rows, columns> &sum) {
    using namespace Eigen::internal;
    constexpr Index width = packet_size<T>;
    constexpr int pointers = (rows + 2) / 3;
    const Index stride = term.row_stride, step = term.column_stride;
    const T *left[pointers];
    for (int i = 0; i < pointers; ++i) left[i] = term.left + (row + 3 * i) * stride + from * step;
    const T *right = term.right.data + from * term.right.row_stride + column;
    for (Index l = from; l < to; ++l, right += term.right.row_stride) {
        Packet<T> r[columns];
#pragma GCC unroll 4
        for (int c = first; c < last; ++c) r[c] = ploadu<Packet<T>>(right + c * width);
#pragma GCC unroll 16
        for (int i = 0; i < rows; ++i) {
            const auto number = pset1<Packet<T>>(left[i / 3][i % 3 * stride]);
#pragma GCC unroll 4
            for (int c = first; c < last; ++c) sum[i][c] = pmadd(number, r[c], sum[i][c]);
        }
#pragma GCC unroll 6
        for (int i = 0; i < pointers; ++i) left[i] += step;
    }
}

// Like the above over all of `inner`, skipping zeros of an operand.
template <bool right_may_be_triangular, class T, int rows, int columns>
FASTH_INLINE void add_term(const Term<T> &term, Index row, Index column, Accumulators<T, rows, columns> &sum) {
    constexpr Index width = packet_size<T>;
    if constexpr (right_may_be_triangular) {
        static_assert(columns <= usual_tile, "");
        if (term.shape == Shape::strictly_upper_right) {
            const Index middle = std::min(term.inner, column + width - 1);
            const Index end = std::min(term.inner, column + columns * width - 1);
            accumulate<0, columns>(term, row, column, 0, middle, sum);
            if constexpr (columns == 2) accumulate<1, 2>(term, row, column, middle, end, sum);
            return;
        }
        if (term.shape == Shape::strictly_lower_right) {
            const Index middle = std::min(term.inner, column + width + 1);
            accumulate<0, 1>(term, row, column, column + 1, columns == 2 ? middle : term.inner, sum);
            if constexpr (columns == 2) accumulate<0, 2>(term, row, column, middle, term.inner, sum);
            return;
        }
    }
    const Index from = term.shape == Shape::upper_left ? row : 0;
    const Index to = term.shape == Shape::lower_left ? std::min(term.inner, row + rows) : term.inner;
    accumulate<0, columns>(term, row, column, from, to, sum);
}

// out = base ± sum, or ± sum, for one tile.
template <Result result, class T, int rows, int columns>
FASTH_INLINE void put(const Accumulators<T, rows, columns> &sum, Index row, Index column, Matrix<const T> base, Matrix<T> out) {
    using namespace Eigen::internal;
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) {
            auto value = sum[i][c];
            const Index j = column + c * packet_size<T>;
            if constexpr (result == Result::negative || result == Result::negative_streamed) value = pnegate(value);
            if constexpr (result == Result::add) value = padd(ploadu<Packet<T>>(base.data + (row + i) * base.row_stride + j), value);
            if constexpr (result == Result::subtract)
                value = psub(ploadu<Packet<T>>(base.data + (row + i) * base.row_stride + j), value);
            T *const target = out.data + (row + i) * out.row_stride + j;
            if constexpr (result == Result::negative_streamed)
                stream(target, value);
            else
                pstoreu(target, value);
        }
}

// out = base ± the sum of the terms, for rows × (columns packets), all of it in registers. The result is not a template's
// argument: to compile the sums once for each takes twice the time.
template <class T, int rows, int columns, int terms>
FASTH_NEVER_INLINE void tile(Result result, const Term<T> (&term)[terms], Index row, Index column, Matrix<const T> base,
                             Matrix<T> out) {
    Accumulators<T, rows, columns> sum;
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < columns; ++c) sum[i][c] = Eigen::internal::pset1<Packet<T>>(T(0));
#pragma GCC unroll 3
    for (int t = 0; t < terms; ++t)
        t == 0 ? add_term<(terms > 1 && columns <= usual_tile)>(term[t], row, column, sum)
               : add_term<false>(term[t], row, column, sum);
    switch (result) {
    case Result::set: return put<Result::set>(sum, row, column, base, out);
    case Result::add: return put<Result::add>(sum, row, column, base, out);
    case Result::subtract: return put<Result::subtract>(sum, row, column, base, out);
    case Result::negative: return put<Result::negative>(sum, row, column, base, out);
    case Result::negative_streamed: return put<Result::negative_streamed>(sum, row, column, base, out);
    }
}

template <class T, int columns, int terms, int rows = tile_rows(columns)>
inline void tile_of(Index wanted, Result result, const Term<T> (&term)[terms], Index row, Index column, Matrix<const T> base,
                    Matrix<T> out) {
    if (wanted == rows) return tile<T, rows, columns>(result, term, row, column, base, out);
    if constexpr (rows > 1) tile_of<T, columns, terms, rows - 1>(wanted, result, term, row, column, base, out);
}

// out = base ± Σ left · right. The number of columns is a multiple of the packet size. The first of several terms may have a
// triangular operand on the right, if tiles are not wider than usual.
template <class T, int tile_columns = usual_tile, int terms>
void product(Result result, Index rows, Index columns, const Term<T> (&term)[terms], Matrix<const T> base, Matrix<T> out,
             Index column = 0) {
    constexpr Index width = tile_columns * packet_size<T>;
    constexpr int most = tile_rows(tile_columns);
    const Index tiles = (rows + most - 1) / most, count = tiles ? rows / tiles : 0;
    for (; column + width <= columns; column += width)
        for (Index i = 0, longer = rows - tiles * count; i < rows; --longer) { // as even as possible
            tile_of<T, tile_columns>(count + (longer > 0), result, term, i, column, base, out);
            i += count + (longer > 0);
        }
    if constexpr (tile_columns > 1)
        if (column < columns) product<T, tile_columns / 2>(result, rows, columns, term, base, out, column);
}

template <class T, int tile_columns = usual_tile>
void product(Result result, Index rows, Index columns, const Term<T> &term, Matrix<const T> base, Matrix<T> out) {
    const Term<T> terms[1] = {term};
    product<T, tile_columns>(result, rows, columns, terms, base, out);
}

// A square of packets, loaded from rows `stride` apart and transposed.
template <class T> using Square = Eigen::internal::PacketBlock<Packet<T>, packet_size<T>>;

template <class T> FASTH_INLINE void load_transposed(const T *from, Index stride, Square<T> &square) {
    for (Index l = 0; l < packet_size<T>; ++l) square.packet[l] = Eigen::internal::ploadu<Packet<T>>(from + l * stride);
    Eigen::internal::ptranspose(square);
}
#if defined(EIGEN_VECTORIZE_AVX512)
// Loading rows 4 apart into the four quarters of a register leaves half of the shuffles to do.
FASTH_INLINE void load_transposed(const float *from, Index stride, Square<float> &square) {
#pragma GCC unroll 4
    for (int c = 0; c < 16; c += 4) {
        __m512 r[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const float *const row = from + i * stride + c;
            r[i] = _mm512_castps128_ps512(_mm_loadu_ps(row));
            r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(row + 4 * stride), 1);
            r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(row + 8 * stride), 2);
            r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps(row + 12 * stride), 3);
        }
        const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
        const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
        const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
        const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
        square.packet[c] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
        square.packet[c + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
        square.packet[c + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
        square.packet[c + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
    }
}
#endif

// to = fromᵀ, where rows and columns of `from` are multiples of the packet size.
template <class T> void transpose(Index rows, Index columns, Matrix<const T> from, Matrix<T> to) {
    constexpr Index width = packet_size<T>;
    for (Index i = 0; i < rows; i += width)
        for (Index j = 0; j < columns; j += width) {
            Square<T> square;
            load_transposed(from.data + i * from.row_stride + j, from.row_stride, square);
#pragma GCC unroll 16
            for (Index l = 0; l < width; ++l)
                Eigen::internal::pstoreu(to.data + (j + l) * to.row_stride + i, square.packet[l]);
        }
}

// to = from, for whole packets.
template <class T> inline void copy(Index rows, Index columns, Matrix<const T> from, Matrix<T> to) {
    constexpr Index width = packet_size<T>;
    for (Index i = 0; i < rows; ++i)
        for (Index j = 0; j < columns; j += width)
            Eigen::internal::pstoreu(to.data + i * to.row_stride + j,
                                     Eigen::internal::ploadu<Packet<T>>(from.data + i * from.row_stride + j));
}

// to = from, for whole packets, and zero in row i before column start(i), or from column stop(i) on: whatever stands there.
template <class T> struct Masks { // a packet of zeros, one of ones, and one of zeros, of bits
    T bits[3 * packet_size<T>] = {};
    Masks() { std::memset(bits + packet_size<T>, 0xff, sizeof(T) * packet_size<T>); }
};
template <class T> inline const Masks<T> masks;

template <class T, class Bound>
FASTH_INLINE void copy_masked(Index rows, Index columns, Matrix<const T> from, Matrix<T> to, const Bound &bound, Index first) {
    using namespace Eigen::internal;
    constexpr Index width = packet_size<T>;
    for (Index i = 0; i < rows; ++i)
        for (Index j = 0, limit = bound(i); j < columns; j += width) {
            const auto mask = ploadu<Packet<T>>(masks<T>.bits + first - std::clamp<Index>(limit - j, 0, width));
            pstoreu(to.data + i * to.row_stride + j, pand(ploadu<Packet<T>>(from.data + i * from.row_stride + j), mask));
        }
}
template <class T, class Bound> void copy_from(Index rows, Index columns, Matrix<const T> from, Matrix<T> to, const Bound &start) {
    copy_masked<T>(rows, columns, from, to, start, packet_size<T>);
}
template <class T, class Bound> void copy_up_to(Index rows, Index columns, Matrix<const T> from, Matrix<T> to, const Bound &stop) {
    copy_masked<T>(rows, columns, from, to, stop, 2 * packet_size<T>);
}

// The sum of each of as many packets as a packet has numbers.
template <class T> FASTH_INLINE Packet<T> sums_of(Square<T> &square) {
    auto *const s = square.packet;
    Eigen::internal::ptranspose(square);
#pragma GCC unroll 4
    for (Index half = packet_size<T> / 2; half; half /= 2)
#pragma GCC unroll 8
        for (Index l = 0; l < half; ++l) s[l] = Eigen::internal::padd(s[l], s[l + half]);
    return s[0];
}
#if defined(EIGEN_VECTORIZE_AVX512)
// Adding up after every step of the transposition halves the remaining work.
template <> FASTH_INLINE __m512 sums_of<float>(Square<float> &square) {
    __m512 *const s = square.packet;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(s[2 * i], s[2 * i + 1]), _mm512_unpackhi_ps(s[2 * i], s[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d even = _mm512_castps_pd(s[2 * i]), odd = _mm512_castps_pd(s[2 * i + 1]);
        s[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)), _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
#pragma GCC unroll 2
    for (int left = 2; left; left /= 2)
#pragma GCC unroll 2
        for (int i = 0; i < left; ++i)
            s[i] = _mm512_add_ps(_mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(s[2 * i], s[2 * i + 1], 0xdd));
    return s[0];
}
#endif

// So many columns, whole packets of them, of two matrices.
template <class T> struct Span {
    const T *left;
    Index left_stride;
    const T *right;
    Index right_stride, columns;
};

// Inner products of rows, in tiles with as many results as a packet has numbers. Registers need to be wide enough for tiles
// that pay.
template <class T> constexpr bool has_inner_products = packet_size<T> >= 8;
constexpr int inner_rows = 4;
template <class T> constexpr int inner_columns = int(packet_size<T>) / inner_rows;

// out = left · rightᵀ for one tile, where both are made of several spans. Not to be inlined: the sums would leave the registers.
template <class T> FASTH_NEVER_INLINE void inner_product_tile(const Span<T> *span, const Span<T> *end, Index i, Index j, Matrix<T> out) {
    using namespace Eigen::internal;
    constexpr Index width = packet_size<T>;
    constexpr int high = inner_rows, wide = inner_columns<T>;
    Square<T> sums;
#pragma GCC unroll 16
    for (Index l = 0; l < width; ++l) sums.packet[l] = pset1<Packet<T>>(T(0));
    for (; span < end; ++span) {
        const Index left_stride = span->left_stride, right_stride = span->right_stride;
        const T *left = span->left + i * left_stride, *right = span->right + j * right_stride;
        const T *last_left = left + 3 * left_stride, *last_right = right + 3 * right_stride;
        for (const T *const stop = left + span->columns; left < stop;
             left += width, right += width, last_left += width, last_right += width) {
            Packet<T> r[wide];
#pragma GCC unroll 4
            for (int b = 0; b < wide; ++b) r[b] = ploadu<Packet<T>>(b < 3 ? right + b * right_stride : last_right);
#pragma GCC unroll 4
            for (int a = 0; a < high; ++a) {
                const auto l = ploadu<Packet<T>>(a < 3 ? left + a * left_stride : last_left);
#pragma GCC unroll 4
                for (int b = 0; b < wide; ++b) sums.packet[a * wide + b] = pmadd(l, r[b], sums.packet[a * wide + b]);
            }
        }
    }
    T tile[high][wide];
    pstoreu(tile[0], sums_of<T>(sums));
    T *const place = out.data + i * out.row_stride + j;
    for (int a = 0; a < high; ++a) std::memcpy(place + a * out.row_stride, tile[a], sizeof(tile[a]));
}

// out = left · rightᵀ for the whole matrix, or from the diagonal on. Rows and columns are multiples of a tile's.
template <class T>
void inner_products(Index rows, Index columns, const Span<T> *spans, Index count, Matrix<T> out, bool upper = false) {
    for (Index i = 0; i < rows; i += inner_rows)
        for (Index j = upper ? i : 0; j < columns; j += inner_columns<T>)
            inner_product_tile<T>(spans, spans + count, i, j, out);
}

// The inverse of an upper triangular square of size `padding`, with its strict upper half in B and the inverse of its diagonal
// in `diagonal`. A finished row is added to all unfinished rows, which are independent sums.
template <class T> inline void invert_square(Matrix<const T> B, const T *diagonal, Matrix<T> out) {
    using namespace Eigen::internal;
    constexpr Index width = packet_size<T>, packets = padding / width;
    Packet<T> rows[padding][packets];
    for (Index i = 0; i < padding; ++i)
        for (Index c = 0; c < packets; ++c) {
            T unit[width] = {};
            if (i / width == c) unit[i % width] = T(1);
            rows[i][c] = ploadu<Packet<T>>(unit);
        }
#pragma GCC unroll 16
    for (Index j = padding - 1; j >= 0; --j) {
        const auto inverse = pset1<Packet<T>>(diagonal[j]);
        for (Index c = 0; c < packets; ++c) {
            rows[j][c] = pmul(rows[j][c], inverse);
            pstoreu(out.data + j * out.row_stride + c * width, rows[j][c]);
        }
#pragma GCC unroll 16
        for (Index i = 0; i < j; ++i) {
            const auto multiple = pset1<Packet<T>>(-B.data[i * B.row_stride + j]);
            for (Index c = 0; c < packets; ++c) rows[i][c] = pmadd(multiple, rows[j][c], rows[i][c]);
        }
    }
}

// Prefetches memory.
template <bool to_write, class T> inline void prefetch(const T *data, Index rows, Index row_stride, Index width) {
#if defined(__GNUC__)
    for (Index i = 0; i < rows; ++i)
        for (Index c = 0; c < width; c += 64 / Index(sizeof(T))) __builtin_prefetch(data + i * row_stride + c, to_write, 2);
#endif
}

} // namespace fasth
